"""Models of the Hugging Face hub: a snapshot of what qforge reads (safetensors, JSON, tokenizer), through huggingface_hub and its cache."""

from __future__ import annotations

from pathlib import Path

from qforge.errors import MissingCapabilityError, ModelError

_WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_UNWANTED = [*(f"*/{pattern}" for pattern in [*_WANTED, "*.py"] if pattern != "*.jinja"), "consolidated*"]  # of other folders, named chat templates alone


def download(source: str, revision: str | None, *, trust_remote_code: bool = False) -> Path:
    """The folder of a hub id, downloaded or from the hub's cache.

    Raises:
        ModelError: the hub has no such model or revision, or it may not be read with this account.
        MissingCapabilityError: the hub cannot be reached, and the cache does not have the model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    at = f" at revision '{revision}'" if revision else ""
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED))
    except GatedRepoError as e:
        raise ModelError(f"'{source}' is gated on the Hugging Face hub: accept its licence there, then log in (hf auth login)") from e
    except RevisionNotFoundError as e:
        raise ModelError(f"the Hugging Face hub has '{source}', but not{at}") from e
    except (RepositoryNotFoundError, HFValidationError) as e:
        raise ModelError(f"'{source}' is neither a path here nor a model of the Hugging Face hub (or a private one: hf auth login)") from e
    except Exception as e:  # no network: which exception depends on the HTTP library, the proxy and HF_HUB_OFFLINE
        if "/" not in source:
            raise ModelError(f"'{source}' is no path here, and the Hugging Face hub cannot be asked for it; give a Hugging Face directory, a .gguf file, a hub id, or demo") from e
        raise MissingCapabilityError(
            f"'{source}'{at} is no path here, is not in the hub's cache, and the Hugging Face hub cannot be reached ({type(e).__name__}); "
            "connect to the network once, or give a local directory or .gguf file"
        ) from e
