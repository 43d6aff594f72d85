import itertools
import zipfile

import pytest

from cosmos_core.errors import ConfigError
from cosmos_service_check.examination import check_files
from cosmos_service_check.subject import Subject
from cosmos_service_check.wheel import unpack

from .wheels import METADATA, build

FILES = {"acme_w/__init__.py": "", "acme_w/py.typed": ""}
ENTRY_POINTS = "[cosmos_core.rewards]\nw = acme_w\n"
INFO, NAME = "acme_w-1.0.dist-info", "acme_w-1.0-py3-none-any.whl"
METADATA_FILES = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}


@pytest.fixture
def make(tmp_path):
    """Build a wheel, and unpack it under the same or another name."""

    folders = (tmp_path / f"unpacked-{number}" for number in itertools.count())

    def unpacked(files=FILES, entry_points=ENTRY_POINTS, metadata=METADATA, name=NAME):
        file = build(tmp_path, "acme-w", files, entry_points, metadata).rename(tmp_path / name)
        folder = next(folders)
        dist, faults = unpack(file, folder)
        return Subject(distribution=dist, records=(), wheel=file, folder=folder, faults=faults)

    return unpacked


def laid_out(wheel):
    files = {path.relative_to(wheel.folder) for path in wheel.folder.rglob("*") if path.is_file()}
    return {file.as_posix() for file in files if file.parts[0] != "acme_w-1.0.data"}


def test_a_wheel_is_laid_out_as_installers_do(make):
    wheel = make()
    assert wheel.faults == []
    assert laid_out(wheel) == {*FILES} | METADATA_FILES
    data = {f"acme_w-1.0.data/{name}": "" for name in ("purelib/acme_w/pure.py", "platlib/acme_w/fast.py", "scripts/w")}
    wheel = make({**FILES, **data})
    assert wheel.faults == []
    assert laid_out(wheel) == {*FILES, "acme_w/pure.py", "acme_w/fast.py"} | METADATA_FILES


def test_what_is_not_its_own_is_named_and_put_on_no_path(make):
    for file, message in [
        ("cosmos_core/errors.py", "lies in cosmos_core, which belongs to cosmos-core; move it into a package of its"),
        ("attr/__init__.py", "lies in attr, which belongs to attrs"),
        ("queue.py", "lies in queue, which belongs to Python"),
        ("typing_extensions.py", "lies in typing_extensions, which belongs to typing-extensions"),
        ("acme_x/__init__.py", "the packages of all other projects; leave it out of the wheel, for example with p"),
        ("weights.data", "would lie beside the packages of all other projects"),
        ("acme_x-1.0.data/purelib/acme_w/x.py", "would lie beside the packages of all other projects"),
        ("acme_w.pth", "would lie beside the packages of all other projects"),
    ]:
        for where in ["", "acme_w-1.0.data/purelib/"]:
            wheel = make({**FILES, f"{where}{file}": "raise SystemExit"})
            (fault,) = wheel.faults
            assert fault.startswith(file)
            assert message in fault
            assert laid_out(wheel) == {*FILES} | METADATA_FILES
    wheel = make({"attr/plugin.py": ""}, "[cosmos_core.rewards]\nw = attr.plugin\n")
    (fault,) = wheel.faults
    assert "attr/plugin.py lies in attr, which belongs to attrs" in fault
    assert laid_out(wheel) == METADATA_FILES


def test_a_record_that_does_not_fit_is_named(make, tmp_path):
    with zipfile.ZipFile(build(tmp_path, "acme-w", FILES, ENTRY_POINTS)) as archive:
        good = archive.read(f"{INFO}/RECORD").decode().splitlines()
    typed = next(row for row in good if "py.typed" in row)
    good.remove(typed)
    for rows, message in [
        ("", "RECORD does not list 'acme_w/py.typed'; build it again"),
        ("acme_w/py.typed,sha256=AAAA,0\n", "RECORD has another hash than 'acme_w/py.typed'"),
        ("acme_w/py.typed,,\n", "RECORD has another hash than 'acme_w/py.typed'"),
        ("acme_w/py.typed,md5=1B2M2Y8AsgTpgAmY7PhCfg,0\n", "RECORD has another hash than 'acme_w/py.typed'"),
        (f"{typed}\ngone.py,,\nacme_w/gone.py,,\n", "RECORD lists what is not there: 'gone.py' and 1 more"),
        (f"{typed}\n" + "a" * 200_000, "RECORD cannot be read"),
    ]:
        (fault,) = make({**FILES, f"{INFO}/RECORD": "\n".join([*good, rows])}).faults
        assert message in fault


def test_a_format_or_a_name_that_installers_refuse_is_told(make):
    for files, message in [
        ({f"{INFO}/WHEEL": "Tag: py3-none-any\n"}, "WHEEL has Wheel-Version '', installers ask for 1.0"),
        ({f"{INFO}/WHEEL": "Wheel-Version: 2.0\n"}, "WHEEL has Wheel-Version '2.0', installers ask for 1.0"),
    ]:
        wheel = make({**FILES, **files})
        (fault,) = wheel.faults
        assert message in fault
        assert laid_out(wheel) == {*FILES} | METADATA_FILES
    for name, message in [
        ("acme_w-1.0-cp27-cp27m-win32.whl", "it is for cp27-cp27m-win32, so pip refuses it for this Python"),
        ("acme_w-1.1-py3-none-any.whl", "its file name is that of acme-w 1.1, its metadata that of acme-w 1.0; build"),
        ("acme_x-1.0-py3-none-any.whl", "its file name is that of acme-x 1.0, its metadata that of acme-w 1.0"),
    ]:
        (fault,) = make(name=name).faults
        assert message in fault


def test_what_is_damaged_or_no_wheel_is_refused(make, tmp_path):
    file = tmp_path / NAME
    for damage in [
        lambda data, central: data.__setitem__(60, data[60] ^ 255),  # what is compressed
        lambda data, central: data.__setitem__(central + 10, 77),  # a compression that nobody has
        lambda data, central: data.__setitem__(central + 8, data[central + 8] | 1),  # encrypted
        lambda data, central: data.__delitem__(slice(central - 20, None)),  # the end
    ]:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{INFO}/METADATA", METADATA * 9)
        data = bytearray(file.read_bytes())
        damage(data, data.index(b"PK\1\2"))
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=r"cannot be read as a wheel: .*; build it again: python -m build"):
            unpack(file, tmp_path / "unpacked")
    for files, message in [
        (
            {f"{INFO}/METADATA": None},
            r"is no wheel: it must have one .dist-info folder, .* and has acme_w-1.0.dist-info;",
        ),
        (
            {f"{INFO}/METADATA": "Version: 1.0\n"},
            "is no wheel: it must have one .dist-info folder, whose METADATA has a name",
        ),
        (
            {"acme_x-1.0.dist-info/METADATA": METADATA},
            r"has acme_w-1.0.dist-info, acme_x-1.0.dist-info; build it again",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            make({**FILES, **files})


def test_what_publishers_tools_refuse_is_refused(make, tmp_path):
    def found(*given, name=NAME):
        return check_files(make(*given, name=name)).findings

    assert found() == ()
    unreadable = METADATA.replace("Requires-Python", "Description-Content-Type: text/x-rst\nRequires-Python")
    for files, metadata, name, told in [
        ({"acme_w/__pycache__/old.cpython-311.pyc": ""}, METADATA, NAME, ("check-wheel-contents refuses it", "W001")),
        ({"../acme_x.py": ""}, METADATA, NAME, ("check-wheel-contents refuses it", "path in RECORD: '../acme_x.py'")),
        ({"/acme_x.py": ""}, METADATA, NAME, ("check-wheel-contents refuses it", "path in RECORD: '/acme_x.py'")),
        ({}, METADATA, "acme.whl", ("check-wheel-contents refuses it", "wheel has invalid filename")),
        ({}, f"{unreadable}\n:nosuch:`role`\n", NAME, ("twine refuses it", "nosuch")),
    ]:
        (fault,) = found({**FILES, **files}, ENTRY_POINTS, metadata, name=name)
        assert fault.level == "fault"
        assert all(each in fault.text for each in told), fault.text
        assert not list(tmp_path.rglob("acme_x.py"))
