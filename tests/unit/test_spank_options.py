"""What the SPANK plugin takes for redundancy is what slurm_resil itself can read, entry by entry."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_resil.core.errors import UsageError
from slurm_resil.core.protection import Protection

SPANK = Path(__file__).resolve().parents[2] / "spank"
MAIN = """
#include "options.c"
#include <stdarg.h>
void slurm_error(const char *format, ...) { (void)format; }
spank_err_t spank_option_register(spank_t sp, struct spank_option *o) { (void)sp; (void)o; return ESPANK_SUCCESS; }
int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		putchar(valid_redundancy(argv[i]) ? '1' : '0');
	return 0;
}
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that says of each argument whether the plugin takes it."""
    cc = shutil.which("cc")
    if cc is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("no compiler, or Slurm's headers are not installed")
    work = tmp_path_factory.mktemp("spank")
    (work / "main.c").write_text(MAIN)
    argv = [cc, "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{SPANK}", "-o", str(work / "main")]
    subprocess.run([*argv, "-fsanitize=undefined", str(work / "main.c")], check=True)
    return work / "main"


def takes(plugin: Path, texts: list[str]) -> list[bool]:
    done = subprocess.run([str(plugin), *texts], capture_output=True, text=True, check=True)
    return [char == "1" for char in done.stdout]


def readable(text: str) -> bool:
    try:
        Protection.parse(text)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("xor", True),
        ("AUTO,drain/4", True),
        ("xor, rs:2 every 10, drain / 20", True),
        ("single", True),
        ("partner:16/1000000", True),
        ("", False),
        ("xor,", False),
        ("xor:2", False),
        ("rs:17", False),
        ("rs:0", False),
        ("rs/1000001", False),
        ("rs every", False),
        ("xor every10", False),
        ("xorrs", False),
        ("auto/2", False),
        ("xor;id", False),
    ],
)
def test_known_ones(plugin: Path, text: str, good: bool) -> None:
    assert takes(plugin, [text]) == [good]


def test_whatever_is_taken_can_be_read_entry_by_entry(plugin: Path) -> None:
    rng = random.Random(4)
    words = [
        "auto",
        "single",
        "xor",
        "drain",
        "partner",
        "rs",
        "raid",
        ":",
        "/",
        " ",
        " every ",
        ",",
        "0",
        "2",
        "10",
        "Xor",
    ]
    texts = ["".join(rng.choice(words) for _ in range(rng.randrange(1, 8))) for _ in range(4000)]
    taken = takes(plugin, texts)
    assert 50 < sum(taken) < len(taken) - 50
    for text, one in zip(texts, taken, strict=True):
        if readable(text):
            assert one, text
        if one:
            assert all(readable(entry) for entry in text.split(",")), text
