"""A chat in the browser that answers twice, plainly and with a draft head, side by side.

    pip install 'gradio>=6'
    python examples/gradio_chat.py --target Qwen/Qwen3-8B --head JetSpec/jetspec-qwen3-8b

Both answers stream, one after the other, so that neither slows the other down; below each stand its tokens per second,
and for the head the tokens per forward of the target. Sampled answers are drawn with the same seed, and are equal too.
"""

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
)

from jetspec_hf import JetSpecHead


@dataclass(frozen=True)
class Side:
    """One of the two answers, as far as it is written.

    Args:
        text (`str`): The answer.
        note (`str`): Its speed, once it is complete.
    """

    text: str = ""
    note: str = ""


def stream(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: Any, seed: int, **options: Any
) -> Iterator[Side]:
    """Generates in a thread of its own, and yields the answer as it grows; the last one has its speed.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        inputs (`BatchEncoding`): The conversation so far.
        seed (`int`): Of sampling.
        options: Of `generate`.

    Raises:
        Exception: Whatever `generate` raises.
    """
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    result: dict[str, Any] = {}

    def generate() -> None:
        torch.manual_seed(seed)
        try:
            result["output"] = target.generate(**inputs, streamer=streamer, return_dict_in_generate=True, **options)
        except Exception as error:
            result["error"] = error
            streamer.end()  # or the loop below would wait for ever

    start = time.perf_counter()
    thread = threading.Thread(target=generate)
    thread.start()
    text = ""
    for piece in streamer:
        text += piece
        yield Side(text)
    thread.join()
    seconds = time.perf_counter() - start
    if "error" in result:
        raise result["error"]
    output = result["output"]
    tokens = output.sequences.shape[1] - inputs["input_ids"].shape[1]
    note = f"{tokens} tokens, {tokens / seconds:.1f} per second"
    acceptance = getattr(output, "acceptance", None)
    if acceptance is not None:
        note += f", τ {acceptance.mean_acceptance_length:.2f}"
    yield Side(text, note)


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> Any:
    """The conversation as the target reads it; without a chat template, just its last words."""
    if tokenizer.chat_template is None:
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: JetSpecHead,
    messages: Sequence[dict[str, str]],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[Side, Side]]:
    """Answers twice, with the head first, and yields both sides as they grow.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        head (`JetSpecHead`): The head.
        messages (`Sequence[dict]`): The conversation, the user's last message at its end.
        max_new_tokens (`int`): Most tokens of an answer.
        temperature (`float`): Of sampling; 0 for greedy answers.
        seed (`int`): Of sampling, the same for both.

    Returns:
        `Iterator[tuple[Side, Side]]`: The plain answer and the one with the head.
    """
    inputs = encode(tokenizer, messages).to(target.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    options = {"max_new_tokens": max_new_tokens, **sampling}
    plain = drafted = Side()
    for drafted in stream(target, tokenizer, inputs, seed, assistant_model=head, **options):
        yield plain, drafted
    for plain in stream(target, tokenizer, inputs, seed, **options):
        yield plain, drafted


def build(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: JetSpecHead) -> Any:
    """The page.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        head (`JetSpecHead`): The head.
    """
    import gradio  # noqa: PLC0415  # only the page needs it

    def say(message: str, history: list[dict[str, str]], temperature: float) -> Iterator[tuple[Any, ...]]:
        messages = [*history, {"role": "user", "content": message}]
        for plain, drafted in answer(target, tokenizer, head, messages, temperature=temperature):
            left, right = ([*messages, {"role": "assistant", "content": side.text}] for side in (plain, drafted))
            yield "", right, left, right, plain.note, drafted.note

    with gradio.Blocks(title="jetspec_hf") as page:
        gradio.Markdown("## The same answer, twice")
        history = gradio.State([])
        with gradio.Row():
            with gradio.Column():
                left, left_note = gradio.Chatbot(label="plain"), gradio.Markdown()
            with gradio.Column():
                right, right_note = gradio.Chatbot(label="with a draft head"), gradio.Markdown()
        box = gradio.Textbox(label="you", submit_btn=True)
        temperature = gradio.Slider(0, 1.5, value=0, step=0.1, label="temperature")
        box.submit(say, [box, history, temperature], [box, history, left, right, left_note, right_note])
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Loads the models and serves the page.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line; that of the process if not given.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--head", required=True, help="folder or Hub id of the head")
    parser.add_argument("--dtype", default="auto", help="of the target (%(default)s)")
    parser.add_argument("--device", default="auto", help="where to put both (%(default)s)")
    options = parser.parse_args(arguments)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype, device_map=options.device)
    head = JetSpecHead.from_pretrained(options.head, dtype=target.dtype, device_map=options.device)
    build(target.eval(), AutoTokenizer.from_pretrained(options.target), head).launch()


if __name__ == "__main__":
    main()
