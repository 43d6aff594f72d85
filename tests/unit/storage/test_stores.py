import pytest

from cosmos_core.errors import StorageError
from cosmos_core.storage import failures, file_system, is_out_of_reach, is_url, reason_of, storage_options, told

NAMES = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION_NAME")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"PROD_S3_CHECKPOINT_{name}", raising=False)
    for name in ("AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"):
        monkeypatch.delenv(name, raising=False)


def give(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", value)


def test_only_s3_takes_credentials_which_are_read_each_time(monkeypatch):
    # They are read each time.
    retries = {"config_kwargs": {"retries": {"mode": "legacy", "total_max_attempts": 8}}}
    assert storage_options("s3://b") == retries
    give(monkeypatch, ACCESS_KEY_ID="key", SECRET_ACCESS_KEY="a", ENDPOINT_URL="http://here", REGION_NAME="eu-west-1")
    expected = {"key": "key", "secret": "a", "endpoint_url": "http://here", **retries}
    assert storage_options("s3://b") == {**expected, "client_kwargs": {"region_name": "eu-west-1"}}
    give(monkeypatch, SECRET_ACCESS_KEY="b")
    assert storage_options("s3://b")["secret"] == "b"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_RETRY_MODE", "standard")
    retries = storage_options("s3://b")["config_kwargs"]["retries"]
    assert retries == {"mode": "standard", "total_max_attempts": 1}, "said, or what was opened with others is taken"

    # Only s3 takes credentials.
    give(monkeypatch, ACCESS_KEY_ID="key", SECRET_ACCESS_KEY="secret")
    for url in ("/tmp/here", "file:///tmp/here", "memory://here", "gs://bucket/here"):
        assert storage_options(url) == {}
    assert storage_options("s3://bucket/here")["secret"] == "secret"


def check_attempts_that_are_no_number_are_refused(monkeypatch, said):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", said)
    with pytest.raises(StorageError, match=f"AWS_MAX_ATTEMPTS is '{said}'; set a whole number of 1 or more"):
        storage_options("s3://bucket/here")


def test_wrong_settings_are_refused(monkeypatch):
    # Attempts that are no number are refused.
    for said in ["0", "many", "-1", "2.5"]:
        check_attempts_that_are_no_number_are_refused(monkeypatch, said)

    # Half of them are refused without telling which.
    for there, lacking in [NAMES[:2], NAMES[1::-1]]:
        with monkeypatch.context() as patched:
            check_half_of_them_are_refused_without_telling_which(patched, there, lacking)


def check_half_of_them_are_refused_without_telling_which(monkeypatch, there, lacking):
    give(monkeypatch, **{there: "tell-nobody"})
    with pytest.raises(StorageError, match=f"CHECKPOINT_{there} is set and .*CHECKPOINT_{lacking} is not") as caught:
        storage_options("s3://bucket/here")
    assert "tell-nobody" not in str(caught.value)


def test_errors_of_stores_are_told_apart():
    # Failures say what to do.
    class NoCredentialsError(Exception):
        pass

    assert "set PROD_S3_CHECKPOINT_ACCESS_KEY_ID and" in reason_of(NoCredentialsError("Unable to locate credentials"))
    assert "(403: refused); the credentials have expired" in reason_of(PermissionError("Forbidden"))
    assert reason_of(PermissionError(13, "Permission denied", "/tmp/x")) == "[Errno 13] Permission denied: '/tmp/x'"
    assert reason_of(ImportError("Install s3fs")) == "Install s3fs; for s3:// install cosmos-core[s3]"
    assert reason_of(OSError("first\nsecond")) == "first"
    assert reason_of(ValueError()) == "ValueError"
    # Errors of botocore are failures.
    exceptions = pytest.importorskip("botocore.exceptions")
    unreachable = exceptions.EndpointConnectionError(endpoint_url="http://here")
    assert isinstance(unreachable, failures())
    assert is_out_of_reach(unreachable)
    with pytest.raises(StorageError, match="s3://here: Could not connect"), told("s3://here"):
        raise unreachable

    # What a store holds is unknown where it cannot be asked.
    assert is_out_of_reach(PermissionError("Forbidden"))
    assert is_out_of_reach(ConnectionRefusedError())
    assert is_out_of_reach(StorageError())
    assert not is_out_of_reach(PermissionError(13, "Permission denied", "/tmp/x"))
    assert not is_out_of_reach(FileNotFoundError())
    assert not is_out_of_reach(ValueError())


def test_a_url_is_told_from_a_path():
    # A kind of url that there is not is told.
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        file_system("nowhere://here")

    # Urls are told from paths.
    assert is_url("s3://bucket/model")
    assert not is_url("/s3/model")
    assert not is_url("org/model")
