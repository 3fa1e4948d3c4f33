from tests.nvml.fixtures import fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library"]
