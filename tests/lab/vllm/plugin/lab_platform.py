"""A vLLM platform plugin: the CPU, seen by Ray as one GPU per host.

Stock vLLM refuses Ray on the CPU. With this, `ray start --num-gpus 1` and vLLM take the code path
of a GPU cluster: placement groups of one GPU per host, with gloo in NCCL's place.
"""

# vLLM is installed in the image only.
# mypy: ignore-errors

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    """The entry point in group vllm.platform_plugins: the path of the class below."""
    return "lab_platform.RayCpuPlatform"


class RayCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, with Ray's name for what it runs on."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The path of the class that carries tensors between ranks."""
        return "lab_communicator.NetworkCpuCommunicator"
