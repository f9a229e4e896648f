#!/usr/bin/env python3
"""Makes token files that the trainer reads, out of text.

    tools/tokenize.py corpus.txt more.jsonl --tokenizer tokenizer.json --eod-token '<|end|>' \\
        --format megatron --output corpus            writes corpus.bin and corpus.idx
    tools/tokenize.py tasks.jsonl --tokenizer tokenizer.json --format jsonl --output tasks.ids.jsonl

Inputs: a file whose name ends in .jsonl holds one JSON object a line, either {"text": ...}, a
document, or {"prompt": ..., "answer": ...}, an example for fine-tuning; every other file is one
document. Other keys are passed over.

Tokenizers: `bytes` (each byte of the UTF-8 text is a token; no package is needed), the path of a
tokenizer.json (package tokenizers), or a directory or name of Hugging Face (package transformers).
No special tokens are added but --eod-token, behind each document.

Formats: uint16 and uint32 are shards with llm.c's header, megatron is Megatron-LM's pair PREFIX.bin
and PREFIX.idx, jsonl is examples as token ids; the trainer appends --eod-token to their answers.

One document is in memory at a time, and 4 bytes for each one of megatron's. Outputs are written
beside their place, synced, and renamed, so what is there is whole; of a pair the index comes last,
and an older index goes first. The same input gives the same bytes.

License: MIT, see LICENSE."""

import os
import sys

if __name__ == "__main__":
    # Found first on the path, this file would stand in for Python's own module `tokenize`.
    sys.path[:] = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]

import argparse
import array
import json
import struct

CHUNK = 1 << 20
SHARD = {"uint16": (20240520, 1, "H", 2), "uint32": (20240801, 7, "I", 4)}


class Refused(Exception):
    """What the user reads, without a traceback."""


# ------------------------------------------------------------------------------------ tokenizers

class Bytes:
    """A token for each byte."""

    vocab = 256

    def encode(self, data, where):
        del where
        return data

    def token(self, name):
        raise Refused(f"--eod-token {name}: the tokenizer `bytes` has no named tokens; give a "
                      "number, 256 for instance")


class Library:
    """One of tokenizers, or of transformers: both know their tokens by name."""

    def __init__(self, encode, lookup, vocab):
        self._encode, self._lookup, self.vocab = encode, lookup, vocab

    def encode(self, data, where):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refused(f"{where}: byte {error.start} is not UTF-8") from None
        return self._encode(text)

    def token(self, name):
        number = self._lookup(name)
        if number is None:
            raise Refused(f"--eod-token {name}: the tokenizer has no such token")
        return number


def open_tokenizer(name):
    if name == "bytes":
        return Bytes()
    if os.path.isfile(name):
        try:
            import tokenizers
        except ImportError:
            raise Refused(f"--tokenizer {name} needs the Python package tokenizers: pip install "
                          "tokenizers (the tokenizer `bytes` needs none)") from None
        try:
            fast = tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # the package raises plain Exceptions
            raise Refused(f"{name}: not a tokenizer.json: {error}") from None
        fast.no_padding()
        fast.no_truncation()
        return Library(lambda text: fast.encode(text, add_special_tokens=False).ids,
                       fast.token_to_id, fast.get_vocab_size())
    try:
        import transformers
    except ImportError:
        raise Refused(f"--tokenizer {name} is no file, and a directory or name needs the Python "
                      "package transformers: pip install transformers (the tokenizer `bytes` needs "
                      "none)") from None
    try:
        auto = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise Refused(f"--tokenizer {name}: {str(error).splitlines()[0]}") from None
    names = auto.get_vocab()
    return Library(lambda text: auto.encode(text, add_special_tokens=False), names.get, len(auto))


# ----------------------------------------------------------------------------------------- inputs

def no_twice(pairs):
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"\"{key}\" is there twice")
    return dict(pairs)


def lines_of(path):
    """(where, object) of each line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            try:
                value = json.loads(line.decode("utf-8"), object_pairs_hook=no_twice)
            except (ValueError, RecursionError) as error:
                raise Refused(f"{where}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise Refused(f"{where}: not an object")
            yield where, value


def text_of(where, value, key):
    if not isinstance(value.get(key), str):
        what = "is no string" if key in value else "is missing"
        raise Refused(f"{where}: \"{key}\" {what}")
    try:
        return value[key].encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(f"{where}: \"{key}\" has half of a surrogate pair") from None


def documents(paths, tokenizer, key):
    """(where, pieces of token ids) of each document."""
    for path in paths:
        if path.endswith(".jsonl"):
            for where, value in lines_of(path):
                yield where, [tokenizer.encode(text_of(where, value, key), where)]
        elif isinstance(tokenizer, Bytes):
            with open(path, "rb") as file:
                yield path, iter(lambda: file.read(CHUNK), b"")
        else:
            with open(path, "rb") as file:
                yield path, [tokenizer.encode(file.read(), path)]


# ---------------------------------------------------------------------------------------- outputs

class Output:
    """A file that appears when it is whole."""

    def __init__(self, path):
        self.path, self.temporary = path, f"{path}.tmp-{os.getpid()}"
        self.file = open(self.temporary, "wb")

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def commit(self):
        os.replace(self.temporary, self.path)

    def abandon(self):
        self.file.close()
        try:
            os.unlink(self.temporary)
        except FileNotFoundError:
            pass


def little(values):
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def packed(code, ids, most, where):
    """Token ids as bytes; the largest that fits is `most`."""
    values = array.array(code)
    try:
        values.extend(ids)  # one by one: array(code, ids) would take bytes as memory
    except OverflowError:
        values = None
    if values is None or (len(values) > 0 and max(values) > most):
        wrong = next(i for i in ids if i < 0 or i > most)
        raise Refused(f"{where}: token {wrong} does not fit: the largest is {most}")
    return little(values)


class Shards:
    """Files with llm.c's header: 256 int32, of which three mean something."""

    def __init__(self, path, name, shard_tokens):
        self.path, self.each = path, shard_tokens
        self.magic, self.version, self.code, self.width = SHARD[name]
        self.most = (1 << 8 * self.width) - 1 if self.width < 4 else (1 << 31) - 1
        self.files, self.count = [], 0

    def _next(self):
        self._finish()
        name = self.path
        if self.each:
            stem, end = os.path.splitext(self.path)
            name = f"{stem}-{len(self.files):05d}{end}"
        self.files.append(Output(name))
        self.files[-1].file.write(bytes(1024))
        self.count = 0

    def _finish(self):
        if self.files:
            file = self.files[-1].file
            file.seek(0)
            file.write(struct.pack("<3i", self.magic, self.version, self.count))
            self.files[-1].close()

    def begin(self, where):
        del where

    def write(self, ids, where):
        limit = self.each or (1 << 31) - 1
        while len(ids) > 0:
            if not self.files or (self.each and self.count == limit):
                self._next()
            room = limit - self.count
            if room == 0:
                raise Refused(f"{self.path}: a shard counts up to {limit} tokens; give "
                              "--shard-tokens for several")
            part, ids = ids[:room], ids[room:]
            self.files[-1].file.write(packed(self.code, part, self.most, where))
            self.count += len(part)

    def end(self, where):
        del where

    def finish(self):
        self._finish()

    def commit(self):
        for file in self.files:
            file.commit()
        return [file.path for file in self.files]


class Megatron:
    """PREFIX.bin and PREFIX.idx; a document is one sequence."""

    def __init__(self, path, vocab):
        for end in (".bin", ".idx"):
            if path.endswith(end):
                path = path[:-4]
        small = vocab < 65500  # as Megatron-LM chooses
        self.dtype, self.code, self.most = (8, "H", 65535) if small else (4, "i", (1 << 31) - 1)
        self.width = 2 if small else 4
        self.lengths, self.length = array.array("i"), 0
        self.files = []
        for end in (".bin", ".idx"):
            self.files.append(Output(path + end))

    def begin(self, where):
        del where
        self.length = 0

    def write(self, ids, where):
        self.files[0].file.write(packed(self.code, ids, self.most, where))
        self.length += len(ids)

    def end(self, where):
        if self.length > (1 << 31) - 1:
            raise Refused(f"{where}: a document of {self.length} tokens; an index counts up to "
                          "2^31 - 1 of each")
        self.lengths.append(self.length)

    def finish(self):
        index, count = self.files[1].file, len(self.lengths)
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, self.dtype, count, count + 1))
        index.write(little(array.array("i", self.lengths)))
        at, step = 0, 1 << 16
        for first in range(0, count, step):
            pointers = array.array("q")
            for length in self.lengths[first:first + step]:
                pointers.append(at)
                at += length * self.width
            index.write(little(pointers))
        for first in range(0, count + 1, step):
            index.write(little(array.array("q", range(first, min(first + step, count + 1)))))
        for file in self.files:
            file.close()

    def commit(self):
        try:  # never an older index beside a newer .bin
            os.unlink(self.files[1].path)
        except FileNotFoundError:
            pass
        for file in self.files:
            file.commit()
        return [file.path for file in self.files]


# --------------------------------------------------------------------------------------- programs

def write_documents(args, tokenizer, eod):
    vocab = max(tokenizer.vocab, eod + 1)
    if args.format == "megatron":
        out = Megatron(args.output, vocab)
    else:
        out = Shards(args.output, args.format, args.shard_tokens)
    count = tokens = 0
    try:
        for where, pieces in documents(args.input, tokenizer, args.text_key):
            out.begin(where)
            for ids in pieces:
                out.write(ids, where)
                tokens += len(ids)
            if eod >= 0:
                out.write([eod], where)
                tokens += 1
            out.end(where)
            count += 1
        if tokens == 0:
            raise Refused(f"{args.input[0]}: no tokens: nothing to write")
        out.finish()
        paths = out.commit()
    except BaseException:
        for file in out.files:
            file.abandon()
        raise
    return f"{count} documents, {tokens} tokens in {' '.join(paths)}"


def write_examples(args, tokenizer):
    out = Output(args.output)
    count = tokens = 0
    try:
        for path in args.input:
            if not path.endswith(".jsonl"):
                raise Refused(f"{path}: examples come from files that end in .jsonl")
            for where, value in lines_of(path):
                ids = [list(tokenizer.encode(text_of(where, value, key), where))
                       for key in (args.prompt_key, args.answer_key)]
                line = json.dumps({"prompt": ids[0], "answer": ids[1]})
                out.file.write(line.encode("ascii") + b"\n")
                count += 1
                tokens += len(ids[0]) + len(ids[1])
        if count == 0:
            raise Refused(f"{args.input[0]}: no examples: nothing to write")
        out.close()
        out.commit()
    except BaseException:
        out.abandon()
        raise
    return f"{count} examples, {tokens} tokens in {args.output}"


def check(args):
    outputs = [args.output]
    if args.format == "megatron":
        prefix = args.output[:-4] if args.output.endswith((".bin", ".idx")) else args.output
        outputs = [prefix + ".bin", prefix + ".idx"]
    for path in args.input:
        for output in outputs:
            if os.path.exists(output) and os.path.exists(path) and os.path.samefile(path, output):
                raise Refused(f"{output} would be written over the input")
    if args.shard_tokens and args.format not in SHARD:
        raise Refused(f"--shard-tokens cuts uint16 and uint32, not {args.format}")
    if args.shard_tokens < 0 or args.shard_tokens >= 1 << 31:
        raise Refused(f"--shard-tokens {args.shard_tokens}: a shard counts 1 to 2^31 - 1 tokens")
    if args.format == "jsonl" and args.eod_token is not None:
        raise Refused("--eod-token is for documents; of examples the trainer appends its own "
                      "--eod-token to the answers")


def eod_of(args, tokenizer):
    if args.eod_token is None:
        return -1
    if not (args.eod_token.isascii() and args.eod_token.isdigit()):
        return tokenizer.token(args.eod_token)
    if int(args.eod_token) >= 1 << 31:
        raise Refused(f"--eod-token {args.eod_token}: tokens end at 2^31 - 1")
    return int(args.eod_token)


def options():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", help="text files, and .jsonl")
    parser.add_argument("--output", required=True, help="the file, or megatron's PREFIX")
    parser.add_argument("--format", required=True,
                        choices=["uint16", "uint32", "megatron", "jsonl"])
    parser.add_argument("--tokenizer", required=True,
                        help="bytes, a tokenizer.json, or a directory or name of Hugging Face")
    parser.add_argument("--eod-token", metavar="TOKEN",
                        help="number or name of a token to put behind each document; default: none")
    parser.add_argument("--shard-tokens", type=int, default=0, metavar="N",
                        help="cut uint16 and uint32 into OUTPUT-00000, ... of N tokens each")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="default: text")
    parser.add_argument("--prompt-key", default="prompt", metavar="KEY", help="default: prompt")
    parser.add_argument("--answer-key", default="answer", metavar="KEY", help="default: answer")
    return parser.parse_args()


def main():
    args = options()
    try:
        check(args)
        tokenizer = open_tokenizer(args.tokenizer)
        if args.format == "jsonl":
            print(write_examples(args, tokenizer))
        else:
            print(write_documents(args, tokenizer, eod_of(args, tokenizer)))
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or args.output}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
