from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from air_nb.errors import DeviceError
from air_nb.monitor.choose import choose_gpus
from air_nb.monitor.gpu_report import DriverState, GpuProcess, GpuReport, GpuSample, GpuState

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-40GB"
GIB = 1 << 30
AT = datetime(2026, 11, 29, 16, 0, tzinfo=UTC)


def idle(index, name=H100):
    return GpuSample(
        index,
        f"GPU-{index}",
        name,
        utilization_percent=0,
        memory_used_bytes=4 << 20,
        memory_total_bytes=80 * GIB,
        mig=False,
    )


def busy(index, gib=40, pid=4711, user="ann"):
    process = GpuProcess(pid, gib * GIB, "python", user)
    return replace(idle(index), utilization_percent=97, memory_used_bytes=gib * GIB, processes=(process,))


def report(*gpus, **changes):
    return replace(GpuReport(AT, DriverState.OK, None, "570.86.15", tuple(gpus)), **changes)


EIGHT = report(busy(0), idle(1), busy(2, pid=99, user="bob"), idle(3), busy(4), idle(5), idle(6), idle(7))


def choose(seen, *, taken=None, **wanted):
    return [gpu.index for gpu in choose_gpus(seen, taken=taken or {}, **wanted)]


def refusal(seen, *, taken=None, **wanted):
    with pytest.raises(DeviceError) as raised:
        choose_gpus(seen, taken=taken or {}, **wanted)
    return str(raised.value)


# ------------------------------------------------------------------------------------------------------- a number


def test_a_number_takes_the_most_idle_in_the_order_of_their_indices():
    assert choose(EIGHT, gpus=2) == [1, 3]
    assert choose(EIGHT, gpus=6) == [0, 1, 3, 5, 6, 7]
    assert choose(EIGHT, gpus=8) == list(range(8))


def test_least_memory_goes_before_least_utilisation():
    seen = report(replace(idle(0), memory_used_bytes=10 * GIB), replace(idle(1), utilization_percent=50))
    assert choose(seen, gpus=1) == [1]
    assert choose(report(replace(idle(0), utilization_percent=50), idle(1)), gpus=1) == [1]


def test_some_mib_of_the_drivers_own_do_not_decide():
    seen = report(replace(idle(0), memory_used_bytes=6 << 20), replace(idle(1), utilization_percent=90))
    assert choose(seen, gpus=1) == [0]


def test_memory_in_use_counts_where_the_driver_names_no_process():
    assert choose(report(replace(busy(0), processes=()), idle(1)), gpus=1) == [1]


def test_memory_of_processes_counts_where_the_driver_tells_no_total():
    assert choose(
        report(replace(busy(0), memory_used_bytes=None), replace(idle(1), memory_used_bytes=GIB)), gpus=1
    ) == [1]


def test_the_larger_of_two_contradicting_counts_decides():
    seen = report(replace(busy(0), memory_used_bytes=4 << 20), replace(idle(1), memory_used_bytes=GIB))
    assert choose(seen, gpus=1) == [1]


def test_unknown_is_not_idle():
    unknown = replace(idle(0), memory_used_bytes=None, utilization_percent=None)
    assert choose(report(unknown, busy(1)), gpus=1) == [1]
    assert choose(
        report(replace(idle(0), utilization_percent=None), replace(idle(1), utilization_percent=99)), gpus=1
    ) == [1]


def test_lost_and_taken_gpus_are_passed_over():
    seen = report(replace(idle(0), state=GpuState.LOST, reason="GPU is lost"), idle(1), idle(2), busy(3))
    assert choose(seen, gpus=2, taken={"GPU-1": "run a"}) == [2, 3]


def test_too_many_names_who_holds_what_and_the_way_to_the_cpu():
    seen = report(
        busy(0),
        idle(1),
        replace(idle(2), state=GpuState.LOST, reason="GPU is lost"),
        replace(idle(3), mig=True),
    )
    assert refusal(seen, gpus=3, taken={"GPU-1": "run swift-otter, pid 12"}) == (
        "3 GPUs were asked for and 1 of the 4 here can be used:\n"
        "  GPU 0  NVIDIA H100 80GB HBM3: 40.0 of 80.0 GiB in use, held by pid 4711 python of ann 40.0 GiB\n"
        "  GPU 1  NVIDIA H100 80GB HBM3: taken by another air_nb run (run swift-otter, pid 12)\n"
        "  GPU 2  NVIDIA H100 80GB HBM3: lost (GPU is lost)\n"
        "  GPU 3  NVIDIA H100 80GB HBM3: in MIG mode: set CUDA_VISIBLE_DEVICES=MIG-... before the kernel starts to use "
        "one of its MIG devices\n"
        "To run on CPU: --device cpu --nproc 3, or set AIR_NB_DEVICE=cpu."
    )


def test_none_at_all_is_one_line_with_the_reason():
    nothing = report(driver_state=DriverState.NO_LIBRARY, reason="libnvidia-ml.so.1 was not found")
    assert refusal(nothing, gpus=8) == (
        "8 GPUs were asked for, and there is none here: libnvidia-ml.so.1 was not found. "
        "To run on CPU: --device cpu --nproc 8, or set AIR_NB_DEVICE=cpu."
    )
    assert "there is none here: the NVIDIA driver reports none" in refusal(report())
    assert refusal(nothing, gpus=1).startswith("1 GPU was asked for")


def test_an_empty_cuda_visible_devices_is_named_as_the_cause():
    assert "CUDA_VISIBLE_DEVICES='' shows none of the 8 GPUs here" in refusal(EIGHT, gpus=1, visible="")


def test_a_last_good_sample_is_used_and_its_age_told():
    seen = replace(EIGHT, driver_state=DriverState.TIMEOUT, reason="the driver did not answer within 2 s")
    assert choose(seen, gpus=2) == [1, 3]
    assert "(as of 16:00:00 UTC: the driver did not answer within 2 s)" in refusal(seen, gpus=9)


# -------------------------------------------------------------------------------------------------- visible, by id


def test_visible_devices_restrict_and_renumber():
    assert choose(EIGHT, visible="7,5,3") == [7, 5, 3]
    assert choose(EIGHT, visible="7,5,3", gpus=2) == [7, 5]
    assert choose(EIGHT, visible="7,5,3", gpu_ids=(2, "0")) == [3, 7]
    message = refusal(EIGHT, visible="7,5", gpus=3)
    assert "3 GPUs were asked for and 2 of the 2 here can be used (CUDA_VISIBLE_DEVICES='7,5' hides 6 more)" in message


def test_ids_keep_their_order_and_may_be_uuids():
    assert choose(EIGHT, gpu_ids=(3, 0)) == [3, 0]
    assert choose(EIGHT, gpu_ids=("gpu-6", "1")) == [6, 1]


@pytest.mark.parametrize(
    "gpu_ids,text",
    [
        ((8,), "GPU id 8 is no GPU here; ids are 0 to 7 or UUIDs"),
        (("-1",), "GPU id -1 is no GPU here"),
        (("GPU-x",), "GPU id GPU-x is no GPU here"),
        (("GPU-",), "GPU id GPU- is the beginning of 8 UUIDs"),
        (("",), "GPU id  is no GPU here"),
        ((1, 1), "GPU ids 1, 1: name at least one GPU, and each once"),
        ((1, "GPU-1"), "each once"),
        ((), "GPU ids (none): name at least one GPU"),
    ],
)
def test_wrong_ids_are_refused(gpu_ids, text):
    assert text in refusal(EIGHT, gpu_ids=gpu_ids)


def test_a_named_gpu_that_another_run_holds_is_refused():
    message = refusal(EIGHT, gpu_ids=(1, 3), taken={"GPU-3": "run swift-otter"})
    assert message.startswith("GPU ids 1, 3 were asked for and 1 of them can't be used")
    assert "taken by another air_nb run (run swift-otter)" in message


def test_a_named_gpu_may_be_busy():
    assert choose(EIGHT, gpu_ids=(0,)) == [0]


def test_all_means_all_or_an_error():
    assert choose(EIGHT) == list(range(8))
    assert "all 8 GPUs were asked for and 1 of them can't be used" in refusal(EIGHT, taken={"GPU-3": "run a"})


# ---------------------------------------------------------------------------------------------------------- type


def test_a_type_is_checked():
    assert choose(EIGHT, gpu_type="H100", gpus=2) == [1, 3]
    assert choose(EIGHT, gpu_type="GPU_8xH100") == list(range(8))
    expected = f"GPU type A10 was asked for and this machine has 8 x {H100}. Leave the type out to take what is there."
    assert refusal(EIGHT, gpu_type="A10", gpus=2) == expected
    assert refusal(EIGHT, gpu_type="A10") == expected


def test_on_a_mixed_machine_a_number_takes_those_of_the_type_and_ids_are_checked():
    mixed = report(idle(0, A100), idle(1), idle(2, A100), busy(3))
    assert choose(mixed, gpus=2, gpu_type="H100") == [1, 3]
    assert choose(mixed, gpu_ids=(1,), gpu_type="H100") == [1]
    assert f"has 1 x {H100}, 1 x {A100}" in refusal(mixed, gpu_ids=(1, 2), gpu_type="A100")
    assert "3 GPUs of type H100 were asked for and 2 of the 4 here can be used" in refusal(
        mixed, gpus=3, gpu_type="H100"
    )


def test_the_count_in_a_type_is_the_count_or_must_agree():
    assert choose(EIGHT, gpu_type="GPU_1xH100") == [1]
    assert choose(EIGHT, gpu_type="GPU_8xH100", gpus=8) == list(range(8))
    message = refusal(EIGHT, gpu_type="GPU_8xH100", gpus=2)
    assert message == (
        "GPU type GPU_8xH100 is 8 GPUs, and 2 were asked for: name one number only, or the type H100 alone."
    )
    assert "GPU type GPU_8xH100 is 8 GPUs" in refusal(EIGHT, gpu_type="GPU_8xH100", gpu_ids=(1, 2))


# ----------------------------------------------------------------------------------------------------------- MIG


def test_a_gpu_in_mig_mode_is_not_used_as_a_whole():
    seen = report(replace(idle(0), mig=True), idle(1))
    assert choose(seen, gpus=1) == [1]
    assert "in MIG mode" in refusal(seen, gpu_ids=(0,))
    assert "in MIG mode" in refusal(seen)


def test_one_mig_device_named_by_the_environment_is_used_as_it_is():
    seen = report(replace(idle(0), mig=True))
    chosen = choose_gpus(seen, visible="MIG-1234", gpu_type="H100", taken={})
    assert [gpu.uuid for gpu in chosen] == ["MIG-1234"]
    assert "a CUDA process sees one of them only" in refusal(seen, visible="MIG-1,MIG-2", gpus=2)
    assert "1 GPU" not in refusal(seen, visible="MIG-1", taken={"MIG-1": "run a"}, gpu_ids=(0,))


# -------------------------------------------------------------------------------------------------- for any input


def test_contradictory_arguments_are_the_callers_fault():
    with pytest.raises(ValueError, match="exclude each other"):
        choose_gpus(EIGHT, gpus=1, gpu_ids=(1,), taken={})
    with pytest.raises(ValueError, match="at least 1"):
        choose_gpus(EIGHT, gpus=0, taken={})


samples = st.builds(
    lambda state, used, utilization, mig: replace(
        idle(0), state=state, memory_used_bytes=used, utilization_percent=utilization, mig=mig
    ),
    st.sampled_from(GpuState),
    st.none() | st.integers(0, 80 * GIB),
    st.none() | st.integers(0, 100),
    st.none() | st.booleans(),
)


@given(st.lists(samples, min_size=1, max_size=8), st.integers(1, 8), st.sets(st.integers(0, 7)))
def test_a_number_gives_that_many_usable_gpus_or_an_error(drawn, count, taken):
    gpus = [replace(gpu, index=index, uuid=f"GPU-{index}") for index, gpu in enumerate(drawn)]
    usable = {gpu.index for gpu in gpus if gpu.state is GpuState.OK and not gpu.mig and gpu.index not in taken}
    locked = {f"GPU-{index}": "run a" for index in taken}
    if len(usable) < count:
        assert f"{len(usable)} of the {len(gpus)} here can be used" in refusal(report(*gpus), gpus=count, taken=locked)
        return
    chosen = choose(report(*gpus), gpus=count, taken=locked)
    assert chosen == sorted(chosen)
    assert len(chosen) == count
    assert usable.issuperset(chosen)
