"""vLLM's CPU communicator, kept to the network: here, ranks are on different hosts."""

# vLLM is installed in the image only.
# mypy: ignore-errors

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class NetworkCpuCommunicator(CpuCommunicator):
    """Never the shared memory that vLLM takes on AVX-512 machines for ranks started by Ray."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
