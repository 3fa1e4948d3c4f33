import pytest

from air_nb.monitor.gpu_type import parse_gpu_type

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "text,name",
    [
        ("H100", H100),
        ("h100", H100),
        ("NVIDIA H100", H100),
        ("H100 80GB", H100),
        ("H100-80GB", H100),
        ("GPU_8xH100", H100),
        ("GPU_8X_H100", H100),
        ("GPU_1xH100", "NVIDIA H100 PCIe"),
        ("8xH100", "NVIDIA H100 NVL"),
        ("a100", "NVIDIA A100-SXM4-40GB"),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("A10", "NVIDIA A10"),
        ("A10", "NVIDIA A10G"),
        ("GPU_1xA10", "NVIDIA A10G"),
        ("A10G", "NVIDIA A10G"),
        ("B300", "NVIDIA B300 SXM6 AC"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("T4", "Tesla T4"),
        ("V100", "Tesla V100-SXM2-16GB"),
        ("L40S", "NVIDIA L40S"),
    ],
)
def test_a_type_matches_the_product_names_of_its_model(text, name):
    assert parse_gpu_type(text).matches(name)


@pytest.mark.parametrize(
    "text,name",
    [
        ("A10", "NVIDIA A100-SXM4-40GB"),
        ("A100", "NVIDIA A10"),
        ("A10G", "NVIDIA A10"),
        ("H100", "NVIDIA A100 80GB PCIe"),
        ("H200", "NVIDIA GH200 480GB"),
        ("L4", "NVIDIA L40S"),
        ("L40", "NVIDIA L40S"),
        ("T4", "NVIDIA T400"),
        ("A100 80GB", "NVIDIA A100-SXM4-40GB"),
        ("RTX 4090", "NVIDIA RTX 6000 Ada Generation"),
        ("H100", None),
    ],
)
def test_a_type_does_not_match_another_model(text, name):
    assert not parse_gpu_type(text).matches(name)


@pytest.mark.parametrize(
    "text,model,count",
    [("GPU_8xH100", "H100", 8), ("GPU_1xA10", "A10", 1), ("H100", "H100", None)],
)
def test_the_count_in_a_type_is_read(text, model, count):
    parsed = parse_gpu_type(text)
    assert (parsed.model, parsed.count, parsed.text) == (model, count, text)


@pytest.mark.parametrize("text", ["", "  ", "GPU_0xH100", "NVIDIA", "--"])
def test_a_type_without_a_model_is_refused(text):
    with pytest.raises(ValueError, match="is no GPU type: write one such as 'H100'"):
        parse_gpu_type(text)
