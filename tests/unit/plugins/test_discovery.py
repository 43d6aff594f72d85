import subprocess
import sys

from cosmos_core.plugins.discovery import DISABLE_VARIABLE, discover

BOMB = "raise RuntimeError('imported')"


def found(name: str, kind=None):
    return [record for record in discover(kind) if record.name == name]


def test_a_record_says_all_that_metadata_knows_and_imports_nothing(make_distribution):
    make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": BOMB}, version="2.5")
    (record,) = found("short", "reward")
    assert (record.kind, record.distribution, record.version, record.module) == ("reward", "acme-a", "2.5", "acme_a")
    assert record.requires == ("cosmos-core>=0.1",)
    assert (record.status, record.problem) == ("ok", "")
    assert "acme_a" not in sys.modules
    assert not found("short", "model")
    assert {record.name: record.status for record in discover(meant=["math"])}["short"] == "not judged"


def test_names_that_conflict_are_told_and_those_of_two_kinds_do_not(make_distribution):
    for name in ("acme-a", "acme-b"):
        module = name.replace("-", "_")
        make_distribution(name, entries={"reward/short": module}, modules={f"{module}.py": ""})
    records = found("short")
    assert [record.status for record in records] == ["conflict", "conflict"]
    assert "acme-a 1.0 and by acme-b 1.0" in records[0].problem
    make_distribution("acme-a", entries={"reward/x1": "acme_a"}, modules={"acme_a.py": ""})
    make_distribution("acme-b", entries={"dataset/x1": "acme_b"}, modules={"acme_b.py": ""})
    assert [(record.kind, record.status) for record in found("x1")] == [("reward", "ok"), ("dataset", "ok")]


def test_one_distribution_may_not_give_one_name_to_two_kinds(make_distribution):
    make_distribution("acme-a", entries={"reward/x1": "acme_a", "dataset/x1": "acme_a"}, modules={"acme_a.py": ""})
    records = found("x1")
    assert [(record.kind, record.status) for record in records] == [("reward", "invalid"), ("dataset", "invalid")]
    assert "gives the name 'x1' to a reward and to a dataset plugin; rename one" in records[0].problem


def test_a_misspelt_group_is_shown_with_the_right_one_and_takes_no_name(make_distribution):
    make_distribution("acme-a", entries="[cosmos_core.reward]\nshort = acme_a\n", modules={"acme_a.py": BOMB})
    (record,) = found("short", "reward")
    assert record.status == "invalid"
    assert 'unknown to the core; write [project.entry-points."cosmos_core.rewards"]' in record.problem
    for group in ["cosmos_core.reward", "cosmos.rewards"]:
        make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""})
        make_distribution("acme-b", entries=f"[{group}]\nshort = acme_b\n", modules={"acme_b.py": ""})
        assert [(record.distribution, record.status) for record in found("short")] == [
            ("acme-a", "ok"),
            ("acme-b", "invalid"),
        ]


def test_a_name_that_no_plugin_may_have_is_shown_with_a_better_one(make_distribution):
    for name, example in [("My Mine", "my-mine"), ("a:b", "a-b"), ("snake_case", "snake-case"), ("", "my-reward")]:
        make_distribution("acme-a", entries={f"reward/{name}": "acme_a"}, modules={"acme_a.py": BOMB})
        (record,) = found(name)
        assert record.status == "invalid"
        assert record.problem.startswith(f"a plugin cannot be named {name!r}: ")
        assert record.problem.endswith(f", such as {example}")


def test_a_group_that_others_may_have_is_theirs_unless_they_require_the_core(make_distribution):
    entries = "[cosmos.rewards]\nshort = acme_a\n"
    make_distribution("acme-a", entries=entries, modules={"acme_a.py": ""}, requires=("numpy",))
    assert not found("short")
    make_distribution("acme-b", entries=entries, modules={"acme_b.py": ""})
    assert [(record.distribution, record.status) for record in found("short")] == [("acme-b", "invalid")]


def test_a_distribution_found_twice_counts_once(make_distribution, tmp_path, monkeypatch):
    make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path / "site-acme-a" / ".." / "site-acme-a"))
    assert len(found("short")) == 1


def test_a_plugin_for_another_release_is_incompatible(make_distribution):
    make_distribution(
        "acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""}, requires=("Cosmos_Core>=99",)
    )
    (record,) = found("short")
    assert record.status == "incompatible"
    assert "requires Cosmos_Core>=99, this is cosmos-core" in record.problem
    assert record.problem.endswith("; pip install -U cosmos-core")


def test_requirements_and_modules_are_judged_without_importing(make_distribution):
    for entry, modules, requires, problem in [
        ("acme_gone", {}, (), "module acme_gone does not exist"),
        ("acme_p.gone", {"acme_p/__init__.py": BOMB}, (), "module acme_p.gone does not exist"),
        ("acme_a.gone", {"acme_a.py": BOMB}, (), "module acme_a.gone does not exist"),
        ("not a module!", {}, (), "names no module"),
        (
            "acme_a",
            {"acme_a.py": ""},
            ("surely-not>=2",),
            "surely-not is not installed; pip install 'surely-not>=2'",
        ),
        ("acme_a", {"acme_a.py": ""}, ("surely-not>=2", "pluggy>=99"), "pluggy>=99 is required"),
        ("acme_a", {"acme_a.py": ""}, ("pluggy>=99",), "pluggy>=99 is required"),
        ("acme_a", {"acme_a.py": ""}, ("???",), "malformed requirement"),
        ("acme_a", {"acme_a.py": ""}, ("attrs; os_name ~= '1'",), "malformed requirement"),
    ]:
        make_distribution("acme-a", entries={"reward/short": entry}, modules=modules, requires=requires)
        (record,) = found("short")
        assert record.status == ("not installed" if problem.startswith("surely") else "broken")
        assert problem in record.problem
    modules = {"acme_p/__init__.py": BOMB, "acme_p/deep/__init__.py": BOMB, "acme_p/deep/er.py": BOMB}
    make_distribution("acme-a", entries={"reward/short": "acme_p.deep.er:target"}, modules=modules)
    assert found("short")[0].status == "ok"
    for extras in ["", " [big]", " [big,small]"]:
        make_distribution(
            "acme-a",
            entries={"reward/short": f"acme_a{extras}"},
            modules={"acme_a.py": ""},
            requires=("surely-not-installed; extra == 'big'", "pluggy; extra == 'small'"),
        )
        assert found("short")[0].status == ("not installed" if extras == " [big]" else "ok")


def test_what_cannot_be_read_of_others_hides_nothing(make_distribution, tmp_path):
    folder = make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""})
    make_distribution("acme-b", entries="[other]\nno equals sign\n[cosmos_core.rewards]\nlonely\n# cosmos_core.\n")
    (folder / "interrupted-1.0.dist-info").mkdir()
    assert found("short")[0].status == "ok"
    assert found("lonely")[0].status == "broken"
    for file in ["METADATA", "entry_points.txt"]:
        make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""})
        folder = make_distribution("acme-b", entries={"reward/other": "acme_b"}, modules={"acme_b.py": ""})
        with (folder / "acme_b-1.0.dist-info" / file).open("ab") as text:
            text.write(b"Ren\xe9 = acme_b\n" if file == "entry_points.txt" else b"Author: Ren\xe9\n")
        assert (found("short")[0].status, found("other")[0].status) == ("ok", "ok")


def test_autoload_can_be_disabled(make_distribution, monkeypatch):
    make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": ""})
    monkeypatch.setenv(DISABLE_VARIABLE, "0")
    assert found("short")
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    assert not found("short")
    assert {record.distribution for record in discover()} == {"cosmos-core"}


def test_the_cores_own_are_registered_the_same_way():
    own = {(record.kind, record.name) for record in discover() if record.distribution == "cosmos-core"}
    assert {("model", "hf"), ("engine", "embedded"), ("launcher", "local")} <= own


def test_discovery_imports_neither_torch_nor_a_converter():
    code = (
        "import sys; from cosmos_core.plugins.discovery import discover; discover(); "
        "print([name for name in ('torch', 'transformers', 'mlflow', 'zmq', 'rich') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
