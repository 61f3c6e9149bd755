"""The process that reads large bodies (process.py). It ends with the one that has begun it, as
nothing more can come then."""

import gc
import os
import pickle
import resource
import signal
import sys
import traceback
from typing import Any

from ssd_gateway.http.errors import ApiError, api_error
from ssd_gateway.reading.process import JOB, RESULT

NICE = 10  # streams that run have the processor first
MOST_BYTES = 512 << 20  # of memory


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the gateway, which may be draining
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    gc.disable()  # it would look at a million values of a body again and again
    while sizes := jobs.read(JOB.size):
        size, body_size = JOB.unpack(sizes)
        # Where memory ends here, so does the process: what was not read is not the next job.
        result = pickle.dumps(_done(jobs.read(size), jobs.read(body_size)))
        results.write(RESULT.pack(len(result)) + result)
        results.flush()
        del result
        gc.collect()


def _done(job: bytes, body: bytes) -> Any:
    try:
        how, terms = pickle.loads(job)
        return how(body, terms)
    except ApiError as error:
        return error
    except MemoryError:
        return ApiError(
            413, "the body takes too much memory; make it shorter", code="request_too_large"
        )
    except Exception as error:
        traceback.print_exc()
        return api_error(error)


if __name__ == "__main__":
    main()
