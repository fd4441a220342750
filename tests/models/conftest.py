from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import TINY_MODELS, save_random

from store_servers import redis_server, s3_server

__all__ = ["redis_server", "s3_server"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """Name of a family -> a folder with its model, made when it is asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            save_random(TINY_MODELS[name].make_config(), 5, torch.float32, made[name])
        return made[name]

    return folder
