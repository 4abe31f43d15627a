"""The generated code is that of the .proto files.

The checked-in code is made by old tools on purpose (`quire.protos.generate`), so it is not compared
byte by byte with what the installed tools make, but in everything that does not depend on them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from quire.protos.generate import PROTO_DIR, PROTO_NAMES, TOOLS_VERSION, compile_protos


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    paths = compile_protos(tmp_path_factory.mktemp("protos"))
    return paths[0].parent


def _descriptor(path: Path) -> FileDescriptorProto:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            return FileDescriptorProto.FromString(ast.literal_eval(node.args[0]))
    raise AssertionError(f"{path} has no descriptor")


def _strings(path: Path) -> list[str]:
    """Method paths, and the protos' comments, which become doc strings."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return sorted(t for t in texts if not re.search(r"grpc|\d+\.\d+\.\d+", t))


def _names(path: Path) -> list[str]:
    """Classes and annotated attributes of a stub file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.append(f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}")
    return sorted(names)


@pytest.mark.parametrize("name", PROTO_NAMES)
def test_checked_in_code_is_current(fresh: Path, name: str) -> None:
    hint = "run: make proto"
    code, stubs, grpc = f"{name}_pb2.py", f"{name}_pb2.pyi", f"{name}_pb2_grpc.py"
    assert _descriptor(PROTO_DIR / code) == _descriptor(fresh / code), hint
    assert _strings(PROTO_DIR / grpc) == _strings(fresh / grpc), hint
    assert _names(PROTO_DIR / stubs) == _names(fresh / stubs), hint


def test_checked_in_code_is_made_by_the_pinned_tools() -> None:
    for name in PROTO_NAMES:
        text = (PROTO_DIR / f"{name}_pb2_grpc.py").read_text()
        assert f"GRPC_GENERATED_VERSION = '{TOOLS_VERSION}'" in text


@pytest.mark.parametrize("name", PROTO_NAMES)
def test_every_message_field_and_method_has_a_comment(name: str) -> None:
    lines = (PROTO_DIR / f"{name}.proto").read_text().splitlines()
    declaration = re.compile(r"(service|message|enum|rpc|oneof|reserved) |.*= \d+;")
    previous = ""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if declaration.match(text):
            assert previous.startswith("//"), f"{name}.proto:{number} has no comment: {text}"
        previous = text
