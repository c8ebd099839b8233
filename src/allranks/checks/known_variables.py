"""Environment variables of NCCL, torch and gloo that people set, and those that these once read.

Plain data: a new release of one of these adds its names here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

#: What people set of what NCCL reads, without the prefix: its page docs/userguide/source/env.rst (docs.nvidia.com/
#: deeplearning/nccl/user-guide/docs/env.html), with names of NCCL_PARAM and ncclGetEnv in its sources, v2.3.5-1 to
#: v2.30.7-1, that are nearly alike: no name of those releases is taken for a misspelt one.
_NCCL = """
    ALGO BUFFSIZE CGA_CLUSTER_SIZE CHECK_MODE CHECK_POINTERS COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING
    COMM_ID CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS
    DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE ENV_PLUGIN GIN_ENABLE GIN_TYPE GRAPH_DUMP_FILE
    GRAPH_DUMP_FILE_RANK GRAPH_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY
    IB_ADDR_RANGE IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS
    IB_MQP_RETRY_CNT IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
    IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY IPC_USE_ABSTRACT_SOCKET
    LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL_BUFFSIZE LOCAL_REGISTER MAX_CTAS
    MEM_SYNC_DOMAIN MIN_CTAS MNNVL MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY
    NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
    NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_CHUNKSIZE NVLS_ENABLE NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME
    P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PXN_LEVEL
    PAT_ENABLE PROFILER_PLUGIN PROTO PROXY_PROFILE PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RMA_DISABLE
    RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SINGLE_PROC_MEM_REG_ENABLE
    SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC
    THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE TUNER_CONFIG_FILE TUNER_PLUGIN UID_STAGGER_RATE
    UID_STAGGER_THRESHOLD WIN_ENABLE WORK_FIFO_BYTES WORK_FIFO_DEPTH
"""

#: Likewise of torch: getCvar* in ProcessGroupNCCL.hpp, FlightRecorder.hpp and NCCLUtils.cpp of torch 2.4 to 2.13, its
#: page torch_nccl_environment_variables, and what is set most of names in its Python files and libraries (2.13).
_TORCH = """
    ALLOW_TF32_CUBLAS_OVERRIDE COMPILE_BACKEND COMPILE_DEBUG COMPILE_DEBUG_DIR COMPILE_DISABLE CPP_LOG_LEVEL
    CUDA_ARCH_LIST DEVICE_BACKEND_AUTOLOAD DISABLE_ADDR2LINE DISTRIBUTED_DEBUG DTRACE ELASTIC_WORKER_IDENTICAL
    EXTENSIONS_DIR FORCE_NO_WEIGHTS_ONLY_LOAD FORCE_WEIGHTS_ONLY_LOAD FR_BUFFER_SIZE FR_CPP_STACK
    FR_DEBUG_INFO_PIPE_FILE FR_DUMP_TEMP_FILE GLOO_LAZY_INIT HOME HUB LOGS LOGS_FORMAT LOGS_OUT MODEL_ZOO
    NCCL_ABORT_IN_DESTROY_PG NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS NCCL_BCAST_UNIQUEID
    NCCL_BLOCKING_WAIT NCCL_COORD_CHECK_MILSEC NCCL_CUDA_EVENT_CACHE NCCL_DEBUG_INFO_PIPE_FILE
    NCCL_DEBUG_INFO_TEMP_FILE NCCL_DESYNC_DEBUG NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING NCCL_ENABLE_TIMING
    NCCL_EXTRA_DUMP_ON_EXEC NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN
    NCCL_NAN_CHECK NCCL_NONBLOCKING_TIMEOUT NCCL_PROPAGATE_ERROR NCCL_RANKS_PER_ROOT NCCL_RETHROW_CUDA_ERRORS
    NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING NCCL_TRACE_BUFFER_SIZE NCCL_TRACE_CPP_STACK
    NCCL_USE_COMM_NONBLOCKING NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK NCCL_WAIT_TIMEOUT_DUMP_MILSEC
    SHOW_CPP_STACKTRACES TRACE USE_CUDA_DSA USE_RTLD_GLOBAL XCCL_XPU_EVENT_CACHE XPU_ARCH_LIST
"""

#: What torchrun and its agents set and read: torch/distributed/elastic (2.13).
_TORCHELASTIC = """
    ENABLE_FILE_TIMER ERROR_FILE ETCD_BINARY_PATH HEALTH_CHECK_PORT LOG_LINE_PREFIX_TEMPLATE MAX_RESTARTS
    RESTART_COUNT RUN_ID SIGNALS_TO_HANDLE TIMER_FILE UNINTERRUPTIBLE_STATE_TIMEOUT USE_AGENT_STORE
"""

#: What gloo reads: getenv in gloo/common and gloo/transport, and in torch's ProcessGroupGloo (2.13).
_GLOO = """
    DEVICE_TRANSPORT DISABLE_CONNECTION_RETRIES ENABLE_RANK_AS_SEQUENCE_NUMBER ENABLE_STORE_V2_API LOG_LEVEL
    SOCKET_IFNAME
"""

#: How names start whose meaning is looked up. Others start so too: of builds, of modules, of plugins for networks.
FAMILIES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "GLOO_")


class Obsolete(NamedTuple):
    """A variable that a library no longer reads, or calls deprecated, from a version on."""

    name: str
    of: Literal["NCCL", "torch"]
    since: tuple[int, ...]
    instead: str = ""  # What to write; empty: nothing.
    is_read: bool = False  # Whether it still does something.
    text: str = ""  # Where it is neither gone nor about to go.


#: What is sure to be there where no version is known: torch 2.4, the oldest that ranks of ours use, brings NCCL 2.20.
OLDEST: dict[str, tuple[int, ...]] = {"NCCL": (2, 20), "torch": (2, 4)}

_STREAMS, _HOOK = "TORCH_NCCL_AVOID_RECORD_STREAMS", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
#: From the page and the tags that are named above: the version is the first that no longer reads it, or where it is
#: still read, the one whose page calls it deprecated. torch 2.2 gave its own variables a prefix of their own.
OBSOLETE = (
    Obsolete("NCCL_SINGLE_RING_THRESHOLD", "NCCL", (2, 3)),
    Obsolete("NCCL_IB_CUDA_SUPPORT", "NCCL", (2, 4), "NCCL_NET_GDR_LEVEL"),
    Obsolete("NCCL_IB_GDR_LEVEL", "NCCL", (2, 4), "NCCL_NET_GDR_LEVEL"),
    Obsolete("NCCL_LL_THRESHOLD", "NCCL", (2, 5), "NCCL_PROTO"),
    Obsolete("NCCL_TREE_THRESHOLD", "NCCL", (2, 5), "NCCL_ALGO"),
    Obsolete("NCCL_RINGS", "NCCL", (2, 5), "NCCL_GRAPH_FILE"),
    Obsolete("NCCL_THREAD_THRESHOLD", "NCCL", (2, 5), "NCCL_THREAD_THRESHOLDS"),
    Obsolete("NCCL_SHARED_BUFF_COUNT", "NCCL", (2, 9)),
    Obsolete("NCCL_GDRCOPY_TAIL_ENABLE", "NCCL", (2, 12)),
    Obsolete("NCCL_AGG_ALLOC_MODE", "NCCL", (2, 13)),
    Obsolete("NCCL_AGG_CHANNEL_SIZE", "NCCL", (2, 20)),
    Obsolete("NCCL_MNNVL", "NCCL", (2, 21), "NCCL_MNNVL_ENABLE"),
    Obsolete("NCCL_WORK_FIFO_DEPTH", "NCCL", (2, 22), "NCCL_WORK_FIFO_BYTES"),
    Obsolete("NCCL_PROXY_PROFILE", "NCCL", (2, 23), "NCCL_PROFILER_PLUGIN"),
    Obsolete("NCCL_CHECKS_DISABLE", "NCCL", (2, 2, 12), is_read=True),
    Obsolete("NCCL_MIN_NRINGS", "NCCL", (2, 5), "NCCL_MIN_CTAS", is_read=True),
    Obsolete("NCCL_MAX_NRINGS", "NCCL", (2, 5), "NCCL_MAX_CTAS", is_read=True),
    Obsolete("NCCL_LAUNCH_MODE", "NCCL", (2, 9), is_read=True),
    Obsolete("NCCL_MIN_NCHANNELS", "NCCL", (2, 17), "NCCL_MIN_CTAS", is_read=True),
    Obsolete("NCCL_MAX_NCHANNELS", "NCCL", (2, 17), "NCCL_MAX_CTAS", is_read=True),
    Obsolete("NCCL_CHECK_POINTERS", "NCCL", (2, 29, 7), "NCCL_CHECK_MODE=DEBUG_LOCAL", is_read=True),
    Obsolete("NCCL_TIMEOUT", "NCCL", (), "timeout= of init_process_group", text="no NCCL has ever read NCCL_TIMEOUT"),
    Obsolete("NCCL_ASYNC_ERROR_HANDLING", "torch", (2, 2), "TORCH_NCCL_ASYNC_ERROR_HANDLING", is_read=True),
    Obsolete("NCCL_BLOCKING_WAIT", "torch", (2, 2), "TORCH_NCCL_BLOCKING_WAIT", is_read=True),
    Obsolete("NCCL_DESYNC_DEBUG", "torch", (2, 2), "TORCH_NCCL_DESYNC_DEBUG", is_read=True),
    Obsolete("NCCL_ENABLE_TIMING", "torch", (2, 2), "TORCH_NCCL_ENABLE_TIMING", is_read=True),
    Obsolete("TORCH_CUDNN_V8_API_ENABLED", "torch", (2, 0)),
    Obsolete(_STREAMS, "torch", (2, 8), is_read=True, text=f"{_STREAMS} is always on since torch 2.8"),
    Obsolete(_HOOK, "torch", (2, 2), f"TORCH_{_HOOK}", is_read=True),
)

_READ = {"NCCL_": _NCCL, "TORCH_": _TORCH, "TORCHELASTIC_": _TORCHELASTIC, "GLOO_": _GLOO}
_NAMES = {family + name for family, names in _READ.items() for name in names.split()}
#: What torch's process groups for other devices, and what all have in common, call their part of what NCCL's reads.
_OTHER_GROUPS = ("TORCH_XCCL_", "TORCH_UCC_", "TORCH_PG_")
_OF_OTHERS = {name.replace("TORCH_NCCL_", group) for name in _NAMES for group in _OTHER_GROUPS}
#: All names that mean something, sorted; what is obsolete does, or did.
KNOWN = tuple(sorted(_NAMES | _OF_OTHERS))
