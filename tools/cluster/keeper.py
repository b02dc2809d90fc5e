"""Keeps a slice until the run on it has ended.

Each turn of `Keeper.keep` asks Google how the slice is, and takes one step from there:

    there is none           ask for it
    queued                  wait
    ready                   start the run, or look how it is
    lost, or in maintenance delete what is left
    the run has ended       delete the slice, and end

All that it must remember is in `record.Record`, written before and after each step. So it can be killed at any moment:
the next one takes over what it finds.
"""

import contextlib
import getpass
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from runtime.messages import duration, say
from tools.cluster.slices import PATIENCE, Passing, Refused

# Seconds between looks. All other times are multiples of it.
PAUSE = float(os.environ.get("KEEP_PAUSE", 30))
REPEAT = 20 * PAUSE  # after which a word is said again that has not changed
SILENCE = 10 * PAUSE  # of a host, after which its slice is taken for lost
LONGEST = 20 * PAUSE  # pause before a slice is asked for again
ANSWER = 60  # seconds within which a host must have answered a question
FAILURES = 5  # of the run, without a newer checkpoint, after which a person must look
LIVES = ("running", "starting")  # how the state of a run begins that has not ended
STOPPED = 143, "stopped, as --stop asked"


class Keeper:
    """slice_: a `slices.Slice`; folder: the locked `record.Folder`; chips: of the slice."""

    def __init__(self, slice_, folder, chips):
        self.slice = slice_
        self.folder = folder
        self.chips = chips
        self.record = folder.read()
        self.record.process = os.getpid()
        folder.save(self.record)
        self.said = {}  # when which words were said in this phase
        self.not_before = 0.0  # when a slice may be asked for, or the run be started, again
        self.refusals = 0  # since the slice was last there
        self.silent = 0.0  # since when a host does not answer
        self.complaint = ""  # why a host was not reached
        self.divided = 0.0  # since when some processes of the run have ended and others have not
        self.deleted = 0.0  # when the slice was last deleted
        self.failed_at = 0.0  # when the run last failed on this slice

    def keep(self):
        """Work until the run has ended and the slice is deleted. Returns the exit status."""
        while not self.record.has_ended:
            view = self.look()
            if view:
                self.turn(view)
            self.folder.save(self.record)
            self.wait()
        return self.record.ending[0]

    def look(self):
        """The `slices.View` of now; None where gcloud does not tell."""
        r = self.record
        try:
            view = self.slice.look()
        except Passing as e:
            return self.tell(f"gcloud does not tell how the slice is ({e}); asking again")
        except Refused as e:
            if r.had:
                return self.tell(f"gcloud refuses to tell how the slice is ({e}); asking again")
            self.end(1, f"gcloud refuses ({e})")
            r.has_ended = True
            return self.enter("ended")
        now = time.time()
        if r.is_paid:
            r.chip_seconds += self.chips * (now - r.looked)
        r.looked, r.is_paid = now, view.is_paid
        if r.born and not r.ending and view.kind != "queued" and view.born != r.born:
            r.lost += 1
            # Google tells of a preemption late: a failure just before it was the slice's, not the run's
            if now < self.failed_at + SILENCE:
                r.failures -= 1
            self.forget()
            self.say(f"the slice was lost: {view.words or 'Google has it no longer'}")
        return view

    def turn(self, view):
        """One step from what Google says."""
        r = self.record
        if r.ending:
            self.let_go(view)
        elif view.kind == "foreign":
            self.leave_to_others(view)
        elif self.is_stopping():
            self.stop(view)
        elif view.kind == "none":
            self.ask()
        elif view.kind == "queued":
            self.enter("waiting for the slice")
            self.tell(f"waiting for the slice: {view.words}", is_phase=True)
        elif view.kind == "deleting":
            self.enter("deleting the slice")
            self.tell("the slice is being deleted", is_phase=True)
        elif view.kind == "lost":
            self.discard(view)
        elif r.is_given_up:
            self.delete("deleting the slice, whose hosts do not answer")
        else:
            self.tend(view)

    # --- the slice

    def leave_to_others(self, view):
        """End without touching a slice that another one made."""
        made = f"{self.slice.name}{' (' + view.words + ')' if view.words else ''}"
        why = f"there is a TPU {made} that this keeper did not make, so it does not touch it; name another TPU_NAME"
        self.end(1, f"{why}, or delete it: {self.slice.deletion()}")
        self.forget()
        self.record.has_ended = True
        self.enter("ended")

    def ask(self):
        """Ask for the slice, unless a request was accepted a moment ago."""
        r, now = self.record, time.time()
        if now < self.not_before or (r.was_accepted and now < r.asked + SILENCE):
            return
        self.enter("asking for the slice")
        (self.folder / "known_hosts").unlink(missing_ok=True)  # the next slice has other keys
        r.asked, r.was_accepted, self.deleted = now, False, 0.0
        self.folder.save(r)
        try:
            self.slice.ask(public_key(self.folder), [self.folder.lock.fileno()])
        except Passing as e:  # the next look shows whether it arrived
            self.tell(f"gcloud did not say whether the slice is asked for ({e})")
        except Refused as e:
            self.refused(str(e), is_hopeless=True)
        else:
            r.was_accepted = True
            self.say(f"asked for {self.slice.name}: {' '.join(self.slice.asked)}")

    def refused(self, why, is_hopeless):
        """Google does not give the slice. What never worked needs a person; what worked before is asked for again."""
        if is_hopeless and not self.record.had:
            return self.end(1, f"Google refuses the slice ({why})")
        self.refusals += 1
        pause = min(LONGEST, PAUSE * 2**self.refusals)
        self.not_before = time.time() + pause
        self.tell(f"Google refuses the slice ({why}); asking again in {duration(pause)}")

    def discard(self, view):
        """Delete what is left of a slice that is lost or was never made."""
        self.enter("deleting the slice")
        if not view.is_paid and view.words.startswith("FAILED") and not self.deleted:
            self.refused(view.words, view.is_hopeless)
            if self.record.ending:
                return
        self.delete(f"deleting what is left of the slice: {view.words}")

    def delete(self, words):
        """Delete the slice, whose label shows that it is ours. Google needs a while, and is asked again after some."""
        if time.time() < self.deleted + SILENCE:
            return
        self.tell(words)
        self.deleted = time.time()
        try:
            self.slice.delete([self.folder.lock.fileno()])
        except (Passing, Refused) as e:
            self.deleted = 0.0
            self.tell(f"the slice could not be deleted ({e}); trying again")

    def forget(self):
        """No run is on a slice that is gone."""
        r = self.record
        r.born = ""
        r.is_launched = r.was_accepted = r.is_given_up = False
        self.silent = self.divided = self.deleted = self.failed_at = 0.0
        (self.folder / "hosts").unlink(missing_ok=True)

    # --- the run

    def tend(self, view):
        """Look after the run on a slice that is ready."""
        r = self.record
        self.refusals, self.deleted = 0, 0.0
        if view.born != r.born:
            r.born, r.had = view.born, True
            self.silent = self.divided = self.not_before = 0.0
        if not (self.folder / "hosts").exists() and not self.find_hosts():
            return self.bear_silence()
        if time.time() < self.not_before:
            return
        states = self.states()
        known = [words for words in states.values() if words is not None]
        # for a key that a new slice does not know the launcher has a remedy
        is_refused = "refuses the key" in self.complaint and not r.is_launched
        if len(known) < len(states) and not is_refused:
            return self.bear_silence()
        self.silent = 0.0
        if r.is_launched or (not is_refused and any(words.startswith(LIVES) for words in known)):
            self.watch(states)
        else:
            self.launch()

    def find_hosts(self):
        """Write down the addresses of the slice's hosts. Returns whether gcloud gave them."""
        words = 'source tools/cluster/cluster.sh && printf "%s\\n" "$HOSTS" "$COORDINATOR"'
        env = {**os.environ, "TPU_TYPE": "", "HOSTS": ""}
        done = run_script(["-c", words], env, PATIENCE)
        if done.returncode == 0:
            self.folder.write("hosts", done.stdout)
        else:
            self.complaint = complaint_of(done)
        return done.returncode == 0

    def environment(self):
        """For launcher.sh and run.sh: the slice that is there, as hosts; the commit that all slices run."""
        r = self.record
        hosts, coordinator = (self.folder / "hosts").read_text().split("\n")[:2]
        env = {**os.environ, "TPU_TYPE": "", "HOSTS": hosts, "COORDINATOR": coordinator}
        env |= {"COMMIT": r.commit, "SYNC": "1" if r.sync else ""}
        storage = {address.partition("://")[0] for address in r.places if "://" in address}
        env["EXTRAS"] = " ".join({*env.get("EXTRAS", "").split(), *storage})
        env.pop("GIT_INDEX_FILE", None)  # of the launcher that has long ended
        stored = self.folder / "sync"
        if r.sync:
            env["GIT_OBJECT_DIRECTORY"] = str(stored / "objects")
            if (stored / "repository").exists():
                env |= {"GIT_DIR": f"{stored}/repository/.git", "GIT_WORK_TREE": os.getcwd()}
        return env

    def states(self):
        """{host: what `run.sh --state` says; None if it cannot be reached}."""
        env = self.environment()

        def state(host):
            done = run_script(["run.sh", "--state", host], env)
            self.complaint = complaint_of(done) or self.complaint
            return done.stdout.strip() if done.returncode == 0 else None

        self.complaint = ""
        hosts = env["HOSTS"].split()
        with ThreadPoolExecutor(32) as pool:
            return dict(zip(hosts, pool.map(state, hosts)))

    def bear_silence(self):
        """Wait for hosts that do not answer; after SILENCE, give the slice up."""
        now, r = time.time(), self.record
        self.silent = self.silent or now
        self.tell(self.complaint or "a host does not answer")
        if now < self.silent + SILENCE:
            return
        r.is_given_up = True
        # a new slice may never answer: a closed firewall, a key that it does not know
        if not r.is_launched:
            self.failed(self.complaint or "a host does not answer")
            self.failed_at = 0.0  # it is the slice that is lost for it

    def launch(self):
        """Start the run on all hosts, and meanwhile keep an eye on the slice."""
        r = self.record
        self.enter("starting the run")
        env = self.environment()
        self.say(f"the slice is there; starting the run on {len(env['HOSTS'].split())} hosts")
        r.restarts += r.starts > 0
        r.starts += 1
        self.folder.save(r)
        held = [self.folder.lock.fileno()]
        process = begin_script(["launcher.sh", *r.flags], env, pass_fds=held)
        is_there, end = True, time.time() + 2 * int(os.environ["START_TIMEOUT"])
        while is_there and process.poll() is None and time.time() < end:
            self.wait(process)
            view = self.look()
            is_there = view is None or (view.kind == "ready" and view.born == r.born)
            is_there = is_there and not self.is_stopping()
        if process.poll() is None:
            end_script(process)  # it takes back what it started, where hosts answer
        if process.wait() == 0 and is_there:
            r.is_launched = True
            self.enter("running")
            self.note_progress()
        elif is_there:
            self.judge_failure("the run could not be started (see above)", self.states())

    def watch(self, states):
        """What to do about a run: nothing while it runs, an end when it has ended, another start when it failed."""
        r = self.record
        if not r.is_launched:
            self.say("the run is there already; watching it")
            r.is_launched, r.starts = True, max(1, r.starts)
        lives = [words for words in states.values() if words.startswith(LIVES)]
        done = [words for words in states.values() if words.startswith("ended with status 0")]
        if len(done) == len(states):
            return self.end(0, f"the run is done: {done[0].partition(': ')[2] or done[0]}")
        if len(lives) == len(states):
            self.divided = 0.0
            self.enter("running")
            return self.tell(lives[0], topic="running")
        self.divided = self.divided or time.time()
        if lives and time.time() < self.divided + SILENCE:
            return  # the others are about to end too
        if lives:
            self.say("some processes of the run have ended and others have not; stopping those")
            self.stop_processes()
        self.judge_failure("the run ended", states)

    def judge_failure(self, what, states):
        """A run that failed is started again, unless a person must change something."""
        self.record.is_launched = False
        self.divided = 0.0
        view = self.look()
        if view is None or view.kind != "ready" or view.born != self.record.born:
            return
        ends = [words for words in states.values() if words and words.startswith("ended")]
        for words in ends:
            if words.startswith("ended with status 2"):
                return self.end(2, f"the run needs a change: {words.partition(': ')[2] or words}")
        print(self.log(20), end="", flush=True)
        self.failed(f"{what}: {(ends or ['it was killed'])[0]}")

    def failed(self, why):
        """Start again after a pause, but not for ever without progress."""
        r = self.record
        r.failures += 1
        self.failed_at = time.time()
        if r.failures >= FAILURES:
            return self.end(1, f"{why}; {FAILURES} failures without a newer checkpoint")
        pause = min(LONGEST, PAUSE * 2 ** (r.failures - 1))
        self.not_before = time.time() + pause
        self.say(f"{why}; starting it again in {duration(pause)}")

    def note_progress(self):
        """A run that resumes from a newer checkpoint makes progress, however often it fails."""
        r = self.record
        steps = [int(step) for step in re.findall(r" resuming \S+ at step (\d+)", self.log(100000))]
        step = steps[-1] if steps else 0
        if step > max(r.resumed, 0):
            r.failures = 0
        elif step == r.resumed:
            self.say(
                f"it resumed at step {step} again: what it did since then was lost; smaller --save_steps save more"
            )
        r.resumed = max(step, r.resumed)

    def log(self, lines):
        """The last lines of the run's log on its first host."""
        env = self.environment()
        first = env["HOSTS"].split()[0]
        return run_script(["run.sh", "--log", first, str(lines)], env).stdout

    def stop_processes(self):
        """End the run on all hosts, with a checkpoint. Returns the status of the launcher, which prints its words."""
        seconds = int(os.environ["STOP_TIMEOUT"]) + ANSWER
        return run_script(
            ["launcher.sh", "--stop"], self.environment(), seconds, prints=True
        ).returncode

    # --- the end

    def stop(self, view):
        """A person has said --stop: end the run with a checkpoint."""
        self.enter("stopping the run")
        if view.kind == "ready" and (self.folder / "hosts").exists():
            self.say("stopping the run, with a checkpoint")
            if self.stop_processes() not in (0, 137):
                self.silent = self.silent or time.time()
                if time.time() < self.silent + SILENCE:
                    return self.tell("the run could not be stopped (see above); trying again")
        self.end(*STOPPED)

    def end(self, status, why):
        """Decide that this is the end."""
        self.record.ending = [status, why]
        self.enter("ending")
        self.folder.save(self.record)
        self.say(why if status in (0, STOPPED[0]) else f"error: {why}")

    def let_go(self, view):
        """Delete the slice, or leave it where KEEP_SLICE says so; then nothing is left to do."""
        if view.kind == "deleting":
            return self.tell("the slice is being deleted")
        if view.kind == "ready" and os.environ.get("KEEP_SLICE"):
            self.say(
                f"the slice stays, as KEEP_SLICE says, and costs money until: {self.slice.deletion()}"
            )
        elif view.kind not in ("none", "foreign"):
            return self.delete("deleting the slice")
        self.forget()
        self.record.has_ended = True
        self.enter("ended")

    # --- words and times

    def enter(self, phase):
        if phase != self.record.phase:
            self.said = {}
            self.record.phase, self.record.since = phase, time.time()
            self.folder.save(self.record)

    def tell(self, words, topic=None, is_phase=False):
        """Say words once, and after a while again. topic: of words that always differ and are not new for that.
        is_phase: they describe the phase, and later it is said how long that has lasted."""
        now, topic = time.time(), topic or words
        if now > self.said.get(topic, 0) + REPEAT:
            lasts = is_phase and topic in self.said
            self.say(words + f" ({duration(now - self.record.since)} so far)" * lasts)
            self.said[topic] = now

    def say(self, words):
        say(" ".join(words.split()))

    def is_stopping(self):
        """Whether a person has said --stop, and the end is not decided yet."""
        return (self.folder / "stopping").exists() and not self.record.ending

    def wait(self, process=None):
        """Until the next look; not as long where --stop is said meanwhile or a process ends."""
        end, before = time.time() + PAUSE, self.is_stopping()
        while time.time() < end and not self.record.has_ended:
            if process and process.poll() is not None:
                return
            if self.is_stopping() and not before:
                return
            time.sleep(min(1, PAUSE / 5))


def run_script(words, env, seconds=ANSWER, prints=False):
    """The CompletedProcess of a script that has at most `seconds`. prints: its output is not captured.

    A host may accept a connection and then do nothing, as one whose disk is gone. ssh would wait for it for ever.
    """
    pipes = {} if prints else dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = begin_script(words, env, **pipes)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_script(process)
        return subprocess.CompletedProcess(
            words, 1, "", f"{' '.join(words)}: took over {seconds} s"
        )
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def complaint_of(done):
    return done.stderr.strip().removeprefix("error: ").rstrip(".")


def begin_script(words, env, **options):
    """A process of bash, in a session of its own: Ctrl-C ends the keeper and not what it has begun."""
    options |= dict(stdin=subprocess.DEVNULL, text=True, start_new_session=True)
    return subprocess.Popen(["bash", *words], env=env, **options)


def end_script(process):
    """End a script, which on SIGTERM ends what it has begun and has ANSWER seconds for that."""
    for number, patience in ((signal.SIGTERM, ANSWER), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience)
            return


def public_key(folder):
    """A file of the public key with which this machine's ssh logs in, as a TPU's metadata has it; None if not found.

    A new slice knows only the keys of its project, and of its own metadata:
    cloud.google.com/compute/docs/connect/add-ssh-keys.
    """
    names = ["~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa"]  # that ssh tries by itself
    given = os.environ.get("SSH_KEY")
    for key in [given] if given else names:
        path = os.path.expanduser(f"{key}.pub")
        if os.path.exists(path):
            user = os.environ.get("SSH_USER") or getpass.getuser()
            with open(path) as f:
                folder.write("keys", f"{user}:{f.read().strip()}\n")
            return folder / "keys"
    return None
