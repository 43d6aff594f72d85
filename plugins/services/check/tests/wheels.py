"""Wheels by hand, good ones and others."""

import base64
import csv
import hashlib
import io
import textwrap
import zipfile

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: 1.0
Summary: Short answers.
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: cosmos-core>=0.1,<0.2

Short answers are better.
"""


def without(*fields):
    """The metadata without some lines."""
    return "".join(line for line in METADATA.splitlines(keepends=True) if not line.startswith(fields))


def build(folder, name, files, entry_points, metadata=METADATA, *, tag="py3-none-any", version="1.0"):
    """A wheel as build backends make it; a file given as None is left out, after it was recorded."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    content = {
        f"{info}/METADATA": metadata.format(name=name),
        f"{info}/entry_points.txt": textwrap.dedent(entry_points),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        **files,
    }
    content = {f"{info}/RECORD": record(info, content), **content}
    wheel = folder / f"{plain}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, source in content.items():
            if source is not None:
                archive.writestr(file, source)
    return wheel


def record(info, content):
    """The record of a wheel."""
    text = io.StringIO()
    rows = [(file, f"sha256={digest(source or '')}", len(source or "")) for file, source in content.items()]
    csv.writer(text).writerows([*rows, (f"{info}/RECORD", "", "")])
    return text.getvalue()


def digest(text):
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
