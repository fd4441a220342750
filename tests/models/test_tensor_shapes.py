"""A file whose tensors are not those of its description is refused, whichever tensor of whichever family it is."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from test_gguf import FIXED, GGUF_FAMILIES
from tiny_models import TINY_MODELS, save_random

from freehold.contract.errors import ModelUnavailable
from freehold.models.loading.dry_run import check_tensors
from freehold.models.loading.gguf_file import GgufCheckpoint
from freehold.models.loading.gguf_layout import Tensor, read_layout
from freehold.models.loading.hf_directory import HfCheckpoint
from freehold.models.loading.resolve import open_checkpoint
from freehold.models.tensor_shapes import CheckedCheckpoint

CASES = [(name, "folder") for name in TINY_MODELS] + [(name, "gguf") for name in GGUF_FAMILIES]


class Stored:
    """An array as safetensors tells of it."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def __getitem__(self, part):
        return self._array[part]


@dataclass
class Model:
    """Opens a model with one of its tensors changed: `change` makes another array of it, or None."""

    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def names(self) -> list[str]:
        return list(open_checkpoint(self.path)._tensors if self.is_gguf else open_checkpoint(self.path)._files)

    def changed(self, monkeypatch, name: str, change):
        with monkeypatch.context() as patch:
            (self._change_gguf if self.is_gguf else self._change_folder)(patch, name, change)
            checkpoint = open_checkpoint(self.path)
            if not self.is_gguf:
                read = checkpoint._read
                checkpoint._read = lambda one: Stored(change(read(one)[:])) if one == name else read(one)
            return checkpoint

    def _change_gguf(self, patch, name: str, change) -> None:
        fields, tensors = read_layout(self.path)
        found = tensors.pop(name)
        array = change(np.asarray(found.data).view(np.float32).reshape(found.shape[::-1]))
        if array is not None:
            raw = np.ascontiguousarray(array).view(np.uint8).ravel()
            tensors[name] = Tensor(array.shape[::-1], gguf.GGMLQuantizationType.F32, raw)
        patch.setattr("freehold.models.loading.gguf_file.read_layout", lambda path: (fields, tensors))

    def _change_folder(self, patch, name: str, change) -> None:
        find = HfCheckpoint._find_files
        is_there = change(np.zeros((4, 4, 4))) is not None
        patch.setattr(HfCheckpoint, "_find_files", lambda self: {
            one: path for one, path in find(self).items() if one != name or is_there})  # fmt: skip


class Spy:
    """Which tensors a decoder asks for."""

    def __init__(self, checkpoint):
        self._checkpoint, self.asked = checkpoint, {}

    def __getattr__(self, name):
        return getattr(self._checkpoint, name)

    def tensor(self, name: str):
        self.asked.setdefault(self._checkpoint._find(name)[0], []).append(name)
        return self._checkpoint.tensor(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made: dict[tuple[str, str], Model] = {}

    def make(name: str, kind: str) -> Model:
        if (name, kind) not in made:
            tiny, folder = TINY_MODELS[name], tmp_path_factory.mktemp(f"{name}-{kind}")
            fixed = FIXED.get(name, {}) if kind == "gguf" else {}
            save_random(replace(tiny, fields={**tiny.fields, **fixed}).make_config(), 5, torch.float32, folder)
            if kind == "gguf":
                write_gguf(folder, folder / "model.gguf")
            made[name, kind] = Model(folder / "model.gguf" if kind == "gguf" else folder)
        return made[name, kind]

    return make


def one_of_each(names: list[str]) -> list[str]:
    """Layers and experts have the same tensors: of each, that of the last layer that has it."""
    return list({re.sub(r"\d+", "#", name): name for name in names}.values())


def with_length(axis: int, more: int):
    def change(array: np.ndarray) -> np.ndarray:
        rows = np.arange(array.shape[axis] + more) % array.shape[axis]
        return np.ascontiguousarray(array.take(rows, axis))

    return change


def wrong_shapes(shape: tuple[int, ...]):
    for axis in range(len(shape)):
        for more in (1, -1) if shape[axis] > 1 else (1,):
            yield f"axis {axis} by {more}", with_length(axis, more)
    if len(shape) > 1 and shape[-1] != shape[-2]:
        yield "transposed", lambda array: np.ascontiguousarray(array.swapaxes(-1, -2))


def shape_of(checkpoint, name: str) -> tuple[int, ...]:
    if isinstance(checkpoint, GgufCheckpoint):
        return checkpoint._tensors[name].shape[::-1]
    return tuple(checkpoint._read(name).get_shape())


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_tensor_of_another_shape_is_refused(name, kind, model, monkeypatch):
    whole = open_checkpoint(model(name, kind).path)
    spy = Spy(whole)
    check_tensors(spy)
    names = model(name, kind).names()
    assert set(names) == set(spy.asked), "every tensor of the file is part of the model"
    accepted = []
    for tensor in one_of_each(names):
        for what, change in wrong_shapes(shape_of(whole, tensor)):
            if kind == "gguf" and what == "transposed" and tensor.endswith(("ssm_a", "ssm_d", "ssm_norm.weight")):
                continue  # a vector, however it is folded
            said = "accepted"
            try:
                changed = CheckedCheckpoint(model(name, kind).changed(monkeypatch, tensor, change))
                for asked in spy.asked[tensor]:
                    changed.tensor(asked)
            except ModelUnavailable as error:
                said = str(error)
            if not any(asked in said for asked in spy.asked[tensor]):
                accepted.append((tensor, what, said))
    assert not accepted


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_missing_tensor_is_refused(name, kind, model, monkeypatch):
    accepted = []
    for tensor in one_of_each(model(name, kind).names()):
        if kind == "gguf" and tensor == "output.weight":
            continue  # without it, the file says that the embeddings are tied
        try:
            check_tensors(model(name, kind).changed(monkeypatch, tensor, lambda array: None))
        except ValueError:
            continue
        accepted.append(tensor)
    assert not accepted


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_is_refused(kind, wrong, model, monkeypatch):
    made = model("llama", kind)
    (name,) = [name for name in made.names() if name in ("model.norm.weight", "output_norm.weight")]
    changed = made.changed(monkeypatch, name, lambda array: np.append(array[:-1], np.float32(wrong)))
    with pytest.raises(ModelUnavailable, match=r"norm\.weight has numbers that are not finite"):
        check_tensors(changed)


@pytest.mark.parametrize("kept", [0, 5, 1000, -5000, -1])
def test_a_truncated_file_is_refused(kept, model, tmp_path):
    folder = shutil.copytree(model("llama", "folder").path, tmp_path / "folder")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelUnavailable, match="can't be read"):
        open_checkpoint(folder)


def test_a_quantized_tensor_has_whole_blocks(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("odd", np.zeros((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read_layout(path)
    raw = path.read_bytes()
    shape = np.array([32, 4], np.uint64).tobytes()
    path.write_bytes(raw.replace(shape, np.array([16, 8], np.uint64).tobytes()))
    with pytest.raises(ValueError, match=r"rows of odd have 16 values, not blocks of 32"):
        read_layout(path)
