"""``python -P -m tasks.pod``: the code that runs inside the run (see tasks/pod/README.md)."""

from __future__ import annotations

import gc
import os
import sys

from tasks.pod.clock import now_s
from tasks.pod.inputs import InputError, outputs_folder, read_inputs
from tasks.pod.interrupt import Interrupt
from tasks.pod.outputs import Outputs, say
from tasks.pod.run import EXIT_HARNESS, Ending, Observed, Run, finish

#: Longest wait, in seconds, of a thread for one that computes. Python's 5 ms would make samples
#: late while a level's answers are counted; the run computes too little for switches to cost.
SWITCH_S = 0.0005


def be_punctual() -> None:
    """Let nothing of this process hold up its samplers for long."""
    sys.setswitchinterval(SWITCH_S)
    # What is there now stays to the end: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()


def main() -> int:
    """Run the cell given in the environment and return the exit code."""
    be_punctual()
    interrupt = Interrupt().install()
    started = now_s()
    try:
        outputs = Outputs(outputs_folder(os.environ))
    except (InputError, OSError) as error:
        say(f"harness_error {error}")
        return EXIT_HARNESS
    try:
        inputs = read_inputs(os.environ)
    except InputError as error:
        ending = Ending(Observed.HARNESS_ERROR, "start", str(error))
        return finish(outputs, ending, started, None, interrupt)
    return Run(inputs, outputs, interrupt).execute()


if __name__ == "__main__":
    # Not sys.exit: while Python takes itself down it gives the signals back, and one that comes
    # then would end a finished run with the wrong exit code.
    code = main()
    sys.stdout.flush()
    os._exit(code)
