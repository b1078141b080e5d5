"""The ctypes records mirror the C structs: every field's name, offset, size and kind of number.

Guards against a field that is added, renamed, moved or retyped on one side only. A record of the right size with two
fields exchanged would otherwise compute with the wrong numbers.
"""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from foredraft.drafters.suffix.native_automaton import _MatchRecord, _RankedDraftRecord
from foredraft.kernels.cpu import build
from foredraft.kernels.cpu import records as module
from foredraft.kernels.cpu.records import RECORDS, LayerRecord, LowRankRecord, NormRecord, PassRecord

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")

RecordType = type[ctypes.Structure]
Layout = dict[str, tuple[int, int, str]]  # field -> offset, size and kind

HEADER = "foredraft.h"
STRUCTS = {
    **dict.fromkeys((*RECORDS, NormRecord, LowRankRecord), HEADER),
    _MatchRecord: "suffix.h",
    _RankedDraftRecord: "suffix.c",
}
NUMBERS = {ctypes.c_int32: "int32", ctypes.c_float: "float", ctypes.c_double: "double"}  # other fields are no numbers
KIND_MACRO = '#define KIND(x) _Generic((x), int32_t: "int32", float: "float", double: "double", default: "other")'
STRUCT = re.compile(r"typedef struct \{(?P<body>[^{}]*)\} (?P<name>fd_\w+);")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DECLARED_FIELD = re.compile(r"(\w+)\s*(?=[,;\[])")


def get_struct_name(record: RecordType) -> str:
    found = re.search(r"\((fd_\w+)\)", record.__doc__ or "")
    assert found, f"the docstring of {record.__name__} names its struct"
    return found[1]


def list_fields(file: str) -> dict[str, list[str]]:
    """List the fields of every struct of a C file, in order."""
    source = COMMENT.sub("", (build.HERE / file).read_text(encoding="utf-8"))
    return {struct["name"]: DECLARED_FIELD.findall(struct["body"]) for struct in STRUCT.finditer(source)}


def measure_structs(folder: Path, file: str, structs: Sequence[str]) -> dict[str, tuple[int, Layout]]:
    """Compile and run a program that prints the size of every struct, and the offset and size of every field."""
    fields = list_fields(file)
    lines = [f'printf("{name}  %zu 0 other\\n", sizeof({name}));' for name in structs]
    lines += [
        f'printf("{name} {field} %zu %zu %s\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}), '
        f"KIND((({name} *)0)->{field}));"
        for name in structs
        for field in fields[name]
    ]
    source, program = folder / "layout.c", folder / "layout"
    body = "\n    ".join(lines)
    headers = f'#include <stddef.h>\n#include <stdio.h>\n#include "{file}"\n'
    source.write_text(f"{headers}{KIND_MACRO}\nint main(void) {{\n    {body}\n}}\n")
    command = [*(build.find_compiler() or []), "-std=c11", f"-I{build.HERE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    sizes: dict[str, int] = {}
    layouts: dict[str, Layout] = {name: {} for name in structs}
    for line in output.splitlines():
        name, field, first, size, kind = line.split(" ")
        if field:
            layouts[name][field] = (int(first), int(size), kind)
        else:
            sizes[name] = int(first)
    return {name: (sizes[name], layouts[name]) for name in structs}


def measure_record(record: RecordType) -> tuple[int, Layout]:
    layout = {}
    for name, kind, *_ in record._fields_:
        field = getattr(record, name)
        layout[name] = (field.offset, field.size, NUMBERS.get(kind, "other"))
    return ctypes.sizeof(record), layout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Layout]]:
    found: dict[str, tuple[int, Layout]] = {}
    for file in sorted(set(STRUCTS.values())):
        names = [get_struct_name(record) for record, home in STRUCTS.items() if home == file]
        found |= measure_structs(tmp_path_factory.mktemp("layout"), file, names)
    return found


@pytest.mark.parametrize("record", STRUCTS, ids=lambda record: record.__name__)
def test_a_record_has_the_fields_of_its_struct(record: RecordType, measured: dict[str, tuple[int, Layout]]) -> None:
    size, layout = measured[get_struct_name(record)]
    own_size, own_layout = measure_record(record)
    assert list(own_layout.items()) == list(layout.items())
    assert own_size == size


def test_every_struct_of_the_header_has_a_record() -> None:
    named = {get_struct_name(record) for record, home in STRUCTS.items() if home == HEADER}
    assert set(list_fields(HEADER)) == named


def test_every_record_of_the_library_is_compared() -> None:
    records = {item for item in vars(module).values() if isinstance(item, type) and issubclass(item, ctypes.Structure)}
    assert records == {record for record, home in STRUCTS.items() if home == HEADER}


def swap_first_fields(record: RecordType) -> RecordType:
    first, second, *rest = record._fields_
    return type("Swapped", (ctypes.Structure,), {"_fields_": [second, first, *rest], "__doc__": record.__doc__})


def rename_first_field(record: RecordType) -> RecordType:
    (_, kind), *rest = [field[:2] for field in record._fields_]
    return type("Renamed", (ctypes.Structure,), {"_fields_": [("other", kind), *rest], "__doc__": record.__doc__})


@pytest.mark.parametrize("change", [swap_first_fields, rename_first_field])
@pytest.mark.parametrize("record", [LayerRecord, PassRecord], ids=lambda record: record.__name__)
def test_a_difference_that_keeps_the_size_is_noticed(
    record: RecordType, change: type, measured: dict[str, tuple[int, Layout]]
) -> None:
    size, layout = measured[get_struct_name(record)]
    own_size, own_layout = measure_record(change(record))
    assert own_size == size
    assert list(own_layout.items()) != list(layout.items())
