"""Our reader of GGUF files against the one of the `gguf` package, and against damaged files."""

import gguf
import numpy as np
import pytest

from freehold.models.loading.gguf_layout import read_layout


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "gr\u00fcn")
    writer.add_array("a.words", ["one", "", "\u4e8c"])
    writer.add_array("a.scores", [1.5, -2.0])
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.standard_normal((3, 64)).astype(np.float32))
    packed = gguf.quantize(rng.standard_normal((5, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_the_reference_reads(file):
    fields, tensors = read_layout(file)
    reference = gguf.GGUFReader(file)
    own = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert fields == own
    assert {tensor.name for tensor in reference.tensors} == tensors.keys()
    for tensor in reference.tensors:
        ours = tensors[tensor.name]
        assert (ours.shape, ours.kind) == (tuple(tensor.shape.tolist()), tensor.tensor_type)
        np.testing.assert_array_equal(ours.data, np.asarray(tensor.data).view(np.uint8).ravel())


def test_a_file_that_is_cut_short_is_refused_wherever_it_is_cut(file, tmp_path):
    whole = file.read_bytes()
    for length in range(1, len(whole) - 12, 7):  # the last tensor is padded by 12 bytes
        short = tmp_path / "short.gguf"
        short.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"short\.gguf"):
            read_layout(short)


def test_other_files_are_refused(file, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + file.read_bytes()[2:])
    with pytest.raises(ValueError, match="not a GGUF file"):
        read_layout(other)
    other.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + file.read_bytes()[8:])
    with pytest.raises(ValueError, match="version 99"):
        read_layout(other)
