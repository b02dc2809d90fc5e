"""How long a device computes in a step, and how much of what travels meanwhile it has to wait for.

`Timeline` walks a program in the order in which its compiler scheduled it. Computation between the start of a transfer
and the wait for it hides that transfer: at most as long as the transfer takes, and each second of computation hides one
transfer alone, the one that began first. The rest is exposed.
"""

from collections import defaultdict

from planning import hlo


class Timeline:
    """Seconds of one step on one device.

    compute_seconds: function of a `hlo.Compute`; link_seconds: of a `hlo.Transfer`.
    """

    def __init__(self, schedule, compute_seconds, link_seconds):
        self.compute_seconds, self.link_seconds = compute_seconds, link_seconds
        self.products = 0.0  # seconds of operations with matrix products
        self.others = 0.0  # and of all others
        self.hidden = defaultdict(float)  # {(axes, kind): seconds}
        self.exposed = defaultdict(float)
        self.walk(schedule, 1)

    def walk(self, schedule, times):
        """Add a schedule that runs so many times. Returns the seconds of computation, of one run, that hide nothing in
        it."""
        flying, spare = [], 0.0  # [name, (axes, kind), seconds left], the first to begin first
        for event in schedule:
            match event:
                case hlo.Compute():
                    spare += self.hide(flying, self.compute(event, times), times)
                case hlo.Loop():
                    inside = self.walk(event.body, times * event.times)
                    spare += self.hide(flying, inside * event.times, times)
                case hlo.Transfer():
                    key = event.axes, event.kind
                    flying.append([event.name, key, self.link_seconds(event)])
                    if not event.name:
                        flying = self.wait(flying, "", times)
                case hlo.Wait():
                    flying = self.wait(flying, event.name, times)
        for name, *_ in list(flying):
            flying = self.wait(flying, name, times)
        return spare

    def compute(self, event, times):
        """Seconds of a `hlo.Compute`, added up."""
        seconds = self.compute_seconds(event)
        if event.flops:
            self.products += seconds * times
        else:
            self.others += seconds * times
        return seconds

    def hide(self, flying, seconds, times):
        """Let so many seconds of computation hide what is flying. Returns the seconds that are left."""
        for transfer in flying:
            _, key, left = transfer
            hidden = min(seconds, left)
            self.hidden[key] += hidden * times
            transfer[2] -= hidden
            seconds -= hidden
        return seconds

    def wait(self, flying, name, times):
        """Expose what is left of the transfers of a name. Returns the others."""
        others = []
        for transfer in flying:
            if transfer[0] == name:
                self.exposed[transfer[1]] += transfer[2] * times
            else:
                others.append(transfer)
        return others
