"""What a task's processes inherit of the environment of the process that starts them: what programs need, and no secrets.

A coordinator's environment holds its own token, and often credentials of its operator. Only the variables named here reach a
task, and those that the operator names (`task_environment`): names, or beginnings of names that end with `*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

USUAL = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "HOSTNAME"),
    *("LANG", "LANGUAGE", "LC_*", "XDG_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *(
        "CUDA_*",
        "NVIDIA_*",
        "NCCL_*",
        "GLOO_*",
        "TP_*",
        "UCX_*",
        "FI_*",
        "RDMAV_*",
        "HSA_*",
        "ROCR_*",
        "HIP_*",
    ),
    *("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "NUMEXPR_*", "MALLOC_*"),
    *("TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "CUBLAS_*"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_ENDPOINT_URL*"),
    *(
        "STRATA_MEMORY_ROOT",
        "STRATA_CACHE_DIR",
        "STRATA_CACHE_LIMIT_MB",
        "STRATA_LOG",
        "STRATA_PRELOAD",
        "STRATA_SEEN_IMPORTS",
    ),
    *("STRATA_CHECKPOINTS", "STRATA_SIGNING_KEY", "STRATA_TLS_CA"),
    *("CHECKPOINT_BUCKET", "CHECKPOINT_DIR", "STORAGE_BACKEND", "LOGLEVEL", "LOG_FORMAT"),
)
"""Credentials are not among them: the coordinator's certificate and key are its own, and AWS_ACCESS_KEY_ID, HF_TOKEN,
WANDB_API_KEY and the like are the operator's to name. Files in the user's home are found all the same."""


def inherited(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Of an environment, what a task inherits. `*` alone is everything."""
    patterns = (*USUAL, *more)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
