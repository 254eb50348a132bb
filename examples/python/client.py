"""A complete asyncio client of Baton: streaming, deadline, cancelling, retries, and errors that can be read.

    python client.py --prompt "Why is the sky blue?"
    python client.py --prompt "Count to a thousand" --timeout 0.5          # DEADLINE_EXCEEDED, exit status 1
    python client.py --prompt "Count to a thousand" --cancel-after 10      # hangs up after 10 messages

Needs `baton-client` (folder client/ of Baton's repository).
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from baton.v1 import inference_pb2, types_pb2
from baton_client import AsyncClient, CallFailed, RetryPolicy

# A call that was refused before it had begun is made again: no worker is ready, or the queue is full. A stream of which
# something has arrived is never repeated.
RETRY = RetryPolicy(max_attempts=5)


async def main() -> int:
    args = arguments()
    async with AsyncClient(args.target, retry=RETRY) as client:
        try:
            await stream(client, args)
        except CallFailed as error:
            print(f"\n{explained(error)}", file=sys.stderr)
            return 1
    return 0


async def stream(client: AsyncClient, args: argparse.Namespace) -> None:
    """Prints text as it comes, then what it cost."""
    # The deadline travels with the call: past it, all of Baton's processes stop working for this request.
    call = client.generate_stream(request(args), timeout_s=args.timeout, metadata=metadata(args))
    num_chunks = 0
    async for message in call:
        match message.WhichOneof("event"):
            case "prompt_info":  # first
                print(f"[{message.prompt_info.request_id}: {message.prompt_info.prompt_tokens} tokens in]")
            case "chunk":
                print(message.chunk.text, end="", flush=True)
                num_chunks += 1
            case "completion":  # last
                finished(message.completion)
        if num_chunks == args.cancel_after:
            call.cancel()  # the workers stop within a step
            print(f"\n[cancelled after {num_chunks} messages]")
            return


def request(args: argparse.Namespace) -> inference_pb2.GenerateRequest:
    wanted = inference_pb2.GenerateRequest()
    wanted.messages.messages.add(role="user", content=args.prompt)
    wanted.sampling.temperature = args.temperature
    wanted.stopping.max_tokens = args.max_tokens
    wanted.stopping.ignore_eos = args.ignore_eos
    return wanted


def metadata(args: argparse.Namespace) -> list[tuple[str, str]]:
    """With a `traceparent`, Baton's spans continue the caller's trace."""
    return [("traceparent", args.traceparent)] if args.traceparent else []


def finished(completion: inference_pb2.Completion) -> None:
    usage, times = completion.usage, completion.timings
    reason = types_pb2.FinishReason.Name(completion.finish_reason).removeprefix("FINISH_REASON_").lower()
    print(
        f"\n[{usage.output_tokens} tokens, {reason}; first token after {times.ttft_ms:.0f} ms, "
        f"in all {times.total_ms:.0f} ms; {completion.workers.prefill} -> {completion.workers.decode}]"
    )


def explained(error: CallFailed) -> str:
    """The status, and of its details what a person can act on."""
    lines = [str(error), *(f"  {violation.field}: {violation.description}" for violation in error.violations)]
    if error.retry_after_s is not None:
        lines.append(f"  try again in {error.retry_after_s:g} s")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Streams an answer from Baton.")
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true", help="write all of --max-tokens")
    parser.add_argument("--timeout", type=float, default=60.0, help="deadline, seconds from now")
    parser.add_argument("--cancel-after", type=int, default=-1, metavar="N", help="hang up after N messages of text")
    parser.add_argument("--traceparent", default="", help="of the caller's span")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
