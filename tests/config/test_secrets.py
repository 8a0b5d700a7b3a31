"""The secrets here are made up, and put together at run time so that no scanner takes this file for a leak."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from europa_exp.config.secrets import find, problems_in, redact, redact_args

FORTY = "0123456789abcdef" * 2 + "01234567"
SECRETS = {
    "Hugging Face token": "hf_" + "aB3dE" * 7,
    "GitHub token": "ghp_" + "aB3dE" * 8,
    "AWS key": "AKIA" + "ABCDEFGH12345678",
    "API key": "sk-" + "proj-" + "aB3dE" * 6,
    "Slack token": "xoxb-" + "1234567890-abcdef",
    "JSON web token": "eyJ" + "hbGciOiJI" + ".eyJ" + "zdWIiOiIx" + ".sig_natur-e123",
    "Google key": "AIza" + "aB3dE" * 7,
    "GitLab token": "glpat-" + "aB3dE" * 4,
    "W&B key": "local-" + FORTY,
}


@pytest.mark.parametrize(("kind", "secret"), SECRETS.items())
@pytest.mark.parametrize(
    "frame", ["{}", "+x = '{}'\n", "https://host/path?key={}&a=1", "before {} after", '{{"k": "{}"}}']
)
def test_known_shapes_are_found_wherever_they_stand(kind: str, secret: str, frame: str) -> None:
    text, findings = redact(frame.format(secret))
    assert secret not in text
    assert kind in {f.kind for f in findings}
    assert len(findings) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"WANDB_API_KEY={FORTY}",
        f"wandb login {FORTY}",
        f"wandb login --relogin {FORTY}",
        f'"api_key": "{FORTY}"',
        f"token: {FORTY}",
    ],
)
def test_forty_digits_behind_a_word_for_a_key_are_a_key(text: str) -> None:
    clean, findings = redact(text)
    assert FORTY not in clean
    assert findings


@pytest.mark.parametrize(
    "text",
    [
        f"commit {FORTY}",
        f"index {FORTY}..{FORTY[::-1]} 100644",
        f'"commit": "{FORTY}"',
        f"identity: {FORTY[:12]}",
        f"uses: wandb/action@{FORTY}",
        "tokens_per_second: 12345678",
        "token: str",
        "def f(token: str | None = None, password: str = None) -> None:",
        "token = tokenizer.decode(ids[0])",
        "eos_token='<|endoftext|>'",
        "eos_token_id: 50256",
        "password = getpass()",
        "password=args.password",
        "secrets = load(path)",
        "password: ${oc.env:PASSWORD}",
        "https://user:${PASSWORD}@host/",
        "https://host:8080/path@2",
        "task-1234567890-abcdefghijklmnop",
        "pad_token_id: 320",
        "key: value12",
        "the token 12 is next",
        "data.mean_document_length=4096",
        "run debug-0123456789ab-r2",
        "hf_hub_download_of_a_very_long_file_name_indeed",
    ],
)
def test_code_commits_and_identities_survive(text: str) -> None:
    assert redact(text) == (text, [])


def test_this_project_itself_holds_nothing_that_looks_like_a_secret() -> None:
    root = Path(__file__).parents[2]
    found = []
    for path in [*root.glob("europa_exp/**/*.py"), *root.glob("conf/**/*.yaml"), *root.glob("sweeps/*")]:
        found += [f"{path}: {f}" for f in find(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("password=hunter2", "hunter2"),
        ("password: 'correct-horse-7'", "correct-horse-7"),
        ("MY_API_KEY=abc123def456", "abc123def456"),
        ("https://me:s3cret!@host/x", "s3cret!"),
        ("postgres://me:only-letters@host", "only-letters"),
        ("Authorization: Bearer abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzzzz", "wJalrXUtnFEMI"),
    ],
)
def test_assigned_secrets_are_found(text: str, secret: str) -> None:
    clean, findings = redact(text)
    assert secret not in clean
    assert len(findings) == 1
    assert text.partition(secret)[0] == clean.partition("[redacted")[0]


def test_strict_takes_what_is_only_letters_too() -> None:
    assert redact("token=abcdefgh")[1] == []
    assert redact("token=abcdefgh", strict=True)[0] == "token=[redacted: secret]"
    assert redact("token=null", strict=True)[1] == []


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("export FOO_PASS=hunter", "hunter"),
        ("export FOO_PASS='two words'", "two words"),
        ('export FOO_PASS="an \\"inner\\" quote"', "inner"),
        ("read KEY <<< x; export DATA_VAULT_KEY=letters", "letters"),
        ("SSH_PASSPHRASE=mypassphrase ssh-add", "mypassphrase"),
        ("mysql --password hunter2x -u me", "hunter2x"),
        ("tool --db-pass=letters", "letters"),
        ("PGPASSWORD=letters psql", "letters"),
        ("export SOME_SECRET_OLD=letters", "letters"),
    ],
)
def test_lines_of_a_job_script_are_read_strictly(line: str, secret: str) -> None:
    assert problems_in({"cluster": {"setup": ["module load x", line]}}) == [("cluster.setup[1]", "secret")]
    for recorded in (line, f"cluster.setup=['{line}']", f'cluster.setup=["{line}"]'):
        assert secret not in redact(recorded, strict=True)[0]
        assert secret not in redact_args([recorded])[0][0]


@pytest.mark.parametrize(
    "line",
    [
        "export TOKENIZERS_PARALLELISM=false",
        "export MAX_TOKEN=512",
        "export HF_TOKEN_PATH=token-file",
        "export SSH_KEY=/p/home/me/.ssh/id_ed25519",
        "export TORCHINDUCTOR_POST_GRAD_PASS=custom",
        "export HF_TOKEN=$(cat ~/.hf)",
        "export WANDB_API_KEY=${WANDB_API_KEY}",
        "cd $PWD; export PWD=/a; OLDPWD=x",
        "first pass: twice the rate; another pass: half of it",
        "sort --key 2n -t, file",
        "apptainer exec --bypass=x --tokenizer=y --keys=z --monkey=w",
        "use --token auth",
    ],
)
def test_lines_that_only_speak_of_secrets_stay(line: str) -> None:
    assert problems_in({"cluster": {"setup": [line]}}) == []
    assert redact(line, strict=True) == (line, [])


def test_findings_name_the_line_and_never_the_secret() -> None:
    secret = SECRETS["GitHub token"]
    _, findings = redact(f"one\ntwo {secret}\nthree\nfour {secret}")
    assert [f.line for f in findings] == [2, 4]
    assert secret not in str(findings)


def test_a_redacted_patch_still_applies(tmp_path: Path) -> None:
    begin, end = "-----BEGIN RSA " + "PRIVATE KEY-----", "-----END RSA " + "PRIVATE KEY-----"
    body = ["MIIEpAIBAAKCAQEA7", "abcdefgh+/=123", "QUJD"]
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "first")
    secret = SECRETS["Hugging Face token"]
    (tmp_path / "a.txt").write_text(
        "\n".join(["one", f"t = '{secret}'", begin, *body, end, "two", "password=hunter22"]) + "\n"
    )
    patch, findings = redact(git(tmp_path, "diff"))
    assert {f.kind for f in findings} == {"Hugging Face token", "private key", "secret"}
    for gone in (secret, *body, "hunter22"):
        assert gone not in patch
    git(tmp_path, "checkout", "-q", "a.txt")
    (tmp_path / "p.diff").write_text(patch)
    git(tmp_path, "apply", "p.diff")
    lines = (tmp_path / "a.txt").read_text().splitlines()
    assert len(lines) == 9
    assert (lines[0], lines[2], lines[6], lines[7]) == ("one", begin, end, "two")


def git(where: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(where), *args], check=True, capture_output=True, text=True).stdout


def test_a_key_without_an_end_does_not_take_the_rest_of_the_text() -> None:
    text = "-----BEGIN " + "PRIVATE KEY-----\nQUJDREVG\nthis is a sentence that stays\n"
    clean, findings = redact(text)
    assert "QUJDREVG" not in clean
    assert "this is a sentence that stays" in clean
    assert [f.kind for f in findings] == ["private key"]


def test_arguments_are_judged_one_by_one_and_in_pairs() -> None:
    args = ["launch.py", "--token", "abc", "training.steps=3", "cluster.env.MY_PASSWORD=xyz", "--seed", "4"]
    clean, findings = redact_args(args)
    assert clean == [
        "launch.py",
        "--token",
        "[redacted: secret]",
        "training.steps=3",
        "cluster.env.MY_PASSWORD=[redacted: secret]",
        "--seed",
        "4",
    ]
    assert [f.line for f in findings] == [3, 5]


def test_problems_name_fields_of_a_configuration() -> None:
    config = {
        "tracking": {"notes": f"see {SECRETS['GitHub token']}", "project": "europa_exp"},
        "cluster": {
            "env": {"HF_TOKEN": "whatever", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        },
        "tags": ["fine", SECRETS["AWS key"]],
        "training": {"seed": 0, "initial_checkpoint": None},
    }
    assert problems_in(config) == [
        ("tracking.notes", "GitHub token"),
        ("cluster.env.HF_TOKEN", "secret"),
        ("tags[1]", "AWS key"),
    ]


def test_every_composition_here_is_free_of_secrets(make) -> None:
    from europa_exp.config.io import to_dict

    for model in ("debug", "europa_1t"):
        assert problems_in(to_dict(make(f"model={model}", "nccl=jupiter"))) == []


def test_a_long_patch_is_searched_in_linear_time() -> None:
    # A search that is quadratic in a long line would not end.
    line = "+" + "aB3_-./" * 60_000 + "\n"
    assert redact(line * 3)[1] == []
