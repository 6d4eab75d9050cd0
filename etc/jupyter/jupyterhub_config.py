"""JupyterHub that starts each user's server as a Slurm job with a fraction of a GPU, by batchspawner's SlurmSpawner.

Take these lines over into the site's jupyterhub_config.py. The hub's machine is a login node of Slurm with sluice-spank, since
sbatch takes --rgpu-mem there.
"""

import html
import re

import batchspawner  # noqa: F401  the hub needs it imported

c = get_config()  # noqa: F821  JupyterHub defines it

c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = 300  # a job may wait in the queue

# (form's name, label, least, most, at first): whole numbers that a user may choose.
NUMBERS = (
    ("percent", "Percent of a GPU", 1, 100, 25),
    ("cores", "Processor cores", 1, 64, 2),
    ("hours", "Hours", 1, 24, 2),
)
# Memory of the GPU, as --rgpu-mem takes it.
MEMORY = re.compile(r"([0-9]{1,40})([MGT])(?:I?B)?", re.IGNORECASE | re.ASCII)
MIB = {"M": 1, "G": 1 << 10, "T": 1 << 20}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", re.ASCII)


def options_form(spawner):
    """The page on which a user says what the server's job is to have."""
    rows = [
        f'<label>{html.escape(label)} <input name="{name}" type="number" min="{low}" max="{high}" value="{first}" required></label>'
        for name, label, low, high, first in NUMBERS
    ]
    rows.append(
        '<label>Memory of the GPU, for example 8G; empty is the same part of it as of the GPU '
        '<input name="mem" pattern="[0-9]+[MGTmgt]([Ii]?[Bb])?"></label>'
    )
    rows.append('<label>Partition <input name="partition"></label>')
    rows.append('<label>Account <input name="account"></label>')
    return "<br>\n".join(rows)


def options_from_form(formdata):
    """What the job's script is filled with. The hub shows the text of an error to the user, and submits nothing."""

    def given(name):
        return formdata.get(name, [""])[0].strip()

    number = {}
    for name, label, low, high, _ in NUMBERS:
        text = given(name)
        if not re.fullmatch("[0-9]{1,6}", text) or not low <= int(text) <= high:
            raise ValueError(f"{label}: {text[:40]!r}: want a whole number from {low} to {high}")
        number[name] = int(text)
    options = []
    if mem := given("mem"):
        m = MEMORY.fullmatch(mem)
        if not m or not 2 <= int(m[1]) * MIB[m[2].upper()] <= 16 << 20:
            raise ValueError(
                f"Memory of the GPU: {mem[:40]!r}: want a whole number with M, G or T behind it from 2M to 16T, for example 8G"
            )
        options.append(f"--rgpu-mem={mem}")
    for name in ("partition", "account"):
        if given(name) and not NAME.fullmatch(given(name)):
            raise ValueError(f"{name}: {given(name)[:40]!r}: want a name of letters, digits, '_', '.' and '-'")
    if given("account"):
        options.append(f"--account={given('account')}")
    return {
        "gres": f"rgpu:{number['percent']}",
        "nprocs": str(number["cores"]),
        "runtime": f"{number['hours']}:00:00",
        "partition": given("partition"),
        "options": " ".join(options),
    }


c.Spawner.options_form = options_form
c.Spawner.options_from_form = options_from_form
