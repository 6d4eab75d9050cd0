"""Tenants of one GPU: programs under `sluice run`, on a worker that knows no turns, or on the bare GPU."""

import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time

LIVING = set()  # processes that are to be ended with us
GUARD = threading.Lock()


class Failed(Exception):
    """What a cell failed of, for its line."""


class Gpu:
    def __init__(self, index):
        self.index = index
        self.pool = f"gpu{index}"
        self.worker = None  # the address of one without turns, once it was needed


class Site:
    """Where things are; gpu-shares.sh wrote it."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            known = json.load(f)
        self.__dict__.update(known)
        self.gpus = [Gpu(i) for i in known["gpus"]]
        self.scratch = tempfile.mkdtemp(dir=known["dir"])

    def file(self, name):
        return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)

    def leases(self):
        """what the daemon says of each lease, by its id"""
        try:
            text = subprocess.run([self.sluice, "list", "--json"], capture_output=True, timeout=5, check=True).stdout
            return {lease["id"]: lease for lease in json.loads(text)}
        except (subprocess.SubprocessError, ValueError) as e:
            return {"error": str(e)}

    def worker_of(self, tenant):
        """the process on the GPU's side of a tenant's session"""
        lease = self.leases().get(tenant.lease)
        if not lease or not lease.get("sessions"):
            raise Failed(f"the daemon shows no session of lease {tenant.lease}")
        return lease["sessions"][0]["worker"]["pid"]

    def change(self, tenant, percent, policy=None):
        """another percent, and policy if one is given, for a living lease"""
        command = [self.sluice, "set", tenant.lease, "--share", str(percent), *(["--policy", policy] if policy else [])]
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
        if done.returncode:
            raise Failed(f"sluice set: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode(errors="replace").strip()

    def without_turns(self, gpu):
        """a worker started by hand, which lends the GPU to whoever comes"""
        if gpu.worker:
            return gpu.worker
        store = os.path.join(self.scratch, f"store{gpu.index}")
        os.mkdir(store, 0o700)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with open(os.path.join(self.logs, f"worker-{gpu.index}.log"), "wb") as log:
            spawn([self.worker, "--listen", f"tcp:127.0.0.1:{port}", "--device", str(gpu.index), "--store", store, *self.worker_flags],
                  stdout=log, stderr=log)
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise Failed(f"the worker without turns of GPU {gpu.index} did not start") from None
            time.sleep(0.05)
        gpu.worker = f"tcp:127.0.0.1:{port}"
        return gpu.worker


def spawn(command, **how):
    p = subprocess.Popen(command, start_new_session=True, **how)
    with GUARD:
        LIVING.add(p)
    return p


def end(p, after=0.0):
    """sees that a process and all that it started are gone"""
    try:
        p.wait(after)
    except subprocess.TimeoutExpired:
        for s, patience in (signal.SIGTERM, 3), (signal.SIGKILL, 10):
            try:
                os.killpg(p.pid, s)
                p.wait(patience)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
    with GUARD:
        LIVING.discard(p)


def end_all():
    for p in list(LIVING):
        end(p)


class Tenant:
    count = 0

    def __init__(self, site, gpu, program, percent, policy, how):
        with GUARD:
            Tenant.count += 1
            name = f"{Tenant.count}-{os.path.basename(program[0])}"
        self.site, self.lease, self.at = site, None, 0
        self.errors = os.path.join(site.logs, f"tenant-{name}.err")
        env = dict(os.environ)
        if how == "native":
            env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"] = str(gpu.index), "PCI_BUS_ID"
            if site.native_lib:  # a simulated GPU's
                env["LD_LIBRARY_PATH"] = site.native_lib + ":" + env.get("LD_LIBRARY_PATH", "")
            self.command = program
        elif how == "off":
            self.command = [site.sluice, "run", "--lib", site.lib, "--worker", site.without_turns(gpu), "--", *program]
        else:
            self.command = [site.sluice, "run", "--lib", site.lib, "--pool", gpu.pool, "--fraction", str(percent), "--policy", policy,
                            "--", *program]
        self.env = env
        self.begin()

    def begin(self):
        self.lines = queue.Queue()
        with open(self.errors, "wb") as err:
            self.p = spawn(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, env=self.env)
        threading.Thread(target=self.read, args=(self.p.stdout, self.lines), daemon=True).start()

    @staticmethod
    def read(stream, lines):
        for line in stream:
            lines.put(line.decode(errors="replace").rstrip("\n"))
        lines.put(None)

    def said(self):
        with open(self.errors, encoding="utf-8", errors="replace") as f:
            return " / ".join(f.read().strip().splitlines()[-3:])[-400:]

    def complained(self, words):
        """how many of its errors have these words"""
        with open(self.errors, encoding="utf-8", errors="replace") as f:
            return sum(words in line for line in f)

    def next(self, seconds):
        try:
            line = self.lines.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            raise Failed(f"nothing came of {self.command[-2:]} in {seconds:.0f} s: {self.said()}") from None
        if line is None:
            raise Failed(f"{self.command[-2:]} ended with {self.p.wait()}: {self.said()}")
        return line

    def line(self, word, seconds):
        """the words after word, on the line that begins with it"""
        until = time.monotonic() + seconds
        while True:
            words = self.next(until - time.monotonic()).split()
            if words and words[0] == word:
                return words[1:]

    def ready(self, seconds):
        """Until it is set up. The lease of who was here before may take a moment to end: then it asks again."""
        until = time.monotonic() + seconds
        again = time.monotonic() + 10
        while True:
            try:
                # a lease's socket lies in a directory of its name
                self.lease = os.path.basename(os.path.dirname(self.line("ready", until - time.monotonic())[0]))
                return
            except Failed:
                if "no lease" not in self.said() or time.monotonic() > again:
                    raise
            end(self.p, 1)
            time.sleep(0.1)
            self.begin()

    def tell(self, line, last=True):
        try:
            self.p.stdin.write((line + "\n").encode())
            self.p.stdin.flush()
            if last:
                self.p.stdin.close()
        except BrokenPipeError:
            raise Failed(f"{self.command[-2:]} is gone: {self.said()}") from None

    def result(self, seconds, last=True):
        """its line of JSON; the last one, after which it has to end well"""
        until = time.monotonic() + seconds
        while True:
            line = self.next(until - time.monotonic())
            if line.startswith("{"):
                break
        if last:
            try:
                status = self.p.wait(max(until - time.monotonic(), 10))
            except subprocess.TimeoutExpired:
                raise Failed(f"{self.command[-2:]} does not end") from None
            if status:
                raise Failed(f"{self.command[-2:]} ended with {status}: {self.said()}")
        return json.loads(line)


def stop(tenants, patience=3):
    """All of them gone, those that were done and those that were not, which have so many s to end by themselves."""
    for t in tenants:
        try:
            t.p.stdin.close()
        except BrokenPipeError:
            pass
    for t in tenants:
        end(t.p, patience)


class Lies:
    """bench/liar, which tells one part of its lies in the name of the second of three tenants, about the first and the third."""

    def __init__(self, site, gpu, part, tenants):
        victim, own, thief = (t.lease for t in tenants)
        self.p = spawn([site.liar, "--turns", os.path.join(site.dir, f"owner{gpu.index}", "run", "turns"), "--own", own, "--thief", thief, "--victim", victim,
                        "--part", str(part[0]), "--parts", str(part[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        told = self.p.stdout.readline()
        if not told:
            raise Failed(f"the liar ended with {self.p.wait()}, see cells-*.err")
        self.told = json.loads(told)

    def end(self):
        """no more lies; answers which were told"""
        self.p.stdin.close()
        end(self.p, 3)
        if self.p.returncode:
            raise Failed(f"the liar ended with {self.p.returncode}, see cells-*.err")
        return self.told
