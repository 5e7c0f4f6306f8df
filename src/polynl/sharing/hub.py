"""Files of networks on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError

from polynl.errors import SettingsError
from polynl.train.checkpoint import SHARED_WEIGHTS

# The Hub counts requests for config.json as downloads of the network.
FILES = ("config.json", SHARED_WEIGHTS)
# Refused, not found, offline, or no network.
UNAVAILABLE = (HTTPError, OSError)


def download(
    repo_id: str,
    *,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> Path:
    """The folder of the cache with the files of a repository; a SettingsError if they cannot be had."""
    try:
        paths = [
            hf_hub_download(
                repo_id,
                name,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
            )
            for name in FILES
        ]
    except HFValidationError:
        raise SettingsError(
            f"{repo_id}: there is no such folder, and a name on the Hub has the form user/name."
        ) from None
    except UNAVAILABLE as error:
        raise SettingsError(f"{repo_id} cannot be downloaded from the Hub: {_reason(error)}.") from error
    return Path(paths[-1]).parent


def upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    message: str,
) -> str:
    """Upload a folder of `save_pretrained`; returns the address of the repository."""
    api = HfApi(token=token, library_name="polynl")
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(url.repo_id, branch=revision, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, revision=revision, commit_message=message)
    except (HFValidationError, *UNAVAILABLE) as error:
        raise SettingsError(f"{repo_id} cannot be uploaded to the Hub: {_reason(error)}.") from error
    return str(url)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].removesuffix(".")
