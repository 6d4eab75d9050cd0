"""JupyterHub that starts each user's server as a Slurm job with a fraction of a GPU, by batchspawner's SlurmSpawner.

Take these lines over into the site's jupyterhub_config.py. The hub's machine is a login node of Slurm with sluice-spank, since
sbatch takes --rgpu-mem there.
"""

import html
import re

import batchspawner
from tornado import web

c = get_config()  # noqa: F821  JupyterHub defines it

c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = 300  # a job may wait in the queue

# (form's name, label, least, most, at first): whole numbers that a user may choose.
NUMBERS = (
    ("percent", "Percent of a GPU", 1, 100, 25),
    ("cores", "Processor cores", 1, 64, 2),
    ("hours", "Hours", 1, 24, 2),
)
# All that a user may choose; the texts may be empty.
CHOICES = tuple(row[0] for row in NUMBERS) + ("mem", "partition", "account")
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


def checked(choices):
    """The choices with their values in order, or a ValueError that says what is wrong. What is not chosen has its first value, or none."""
    for name in choices:
        if name not in CHOICES:
            raise ValueError(f"{name[:40]!r}: there is no such choice: want {', '.join(CHOICES)}")

    def given(name, first=""):
        value = choices.get(name, first)
        if type(value) not in (int, str):  # True is no 1
            raise ValueError(f"{name}: {str(value)[:40]!r}: want a number or a text")
        return str(value).strip()

    result = {}
    for name, label, low, high, first in NUMBERS:
        text = given(name, first)
        if not re.fullmatch("[0-9]{1,6}", text) or not low <= int(text) <= high:
            raise ValueError(f"{label}: {text[:40]!r}: want a whole number from {low} to {high}")
        result[name] = int(text)
    if mem := given("mem"):
        m = MEMORY.fullmatch(mem)
        if not m or not 2 <= int(m[1]) * MIB[m[2].upper()] <= 16 << 20:
            raise ValueError(
                f"Memory of the GPU: {mem[:40]!r}: want a whole number with M, G or T behind it from 2M to 16T, for example 8G"
            )
        result["mem"] = mem
    for name in ("partition", "account"):
        if text := given(name):
            if not NAME.fullmatch(text):
                raise ValueError(f"{name}: {text[:40]!r}: want a name of letters, digits, '_', '.' and '-'")
            result[name] = text
    return result


def options_from_form(formdata):
    """The choices of the form. The hub shows the text of an error to the user, and submits nothing."""
    return checked({name: formdata[name][0] for name in CHOICES if formdata.get(name)})


class FractionSpawner(batchspawner.SlurmSpawner):
    """A Slurm job with a fraction of a GPU.

    The hub's REST interface takes a user's choices without the form, as user_options, and hands out those of the last start again. And
    batchspawner fills the batch script with whatever is in user_options. So they are checked where the script is made.
    """

    async def submit_batch_script(self):
        try:
            choices = checked(self.user_options)
        except ValueError as e:
            raise web.HTTPError(400, str(e)) from None
        self.user_options = choices
        self.req_gres = f"rgpu:{choices['percent']}"
        self.req_nprocs = str(choices["cores"])
        self.req_runtime = f"{choices['hours']}:00:00"
        arguments = {"--rgpu-mem": choices.get("mem"), "--account": choices.get("account")}
        self.req_options = " ".join(f"{name}={value}" for name, value in arguments.items() if value)
        return await super().submit_batch_script()


c.JupyterHub.spawner_class = FractionSpawner
c.Spawner.options_form = options_form
c.Spawner.options_from_form = options_from_form
