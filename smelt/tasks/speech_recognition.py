"""Speech recognition: from audio to its transcript, by an encoder of spectrograms and a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.files import read_json_object
from smelt.data.audio import check_audio
from smelt.data.examples import parse_references, text_of_column
from smelt.data.media_rows import read_media_rows
from smelt.data.read_rows import RowIterator
from smelt.data.splits import Columns, Example, Split
from smelt.tasks.spec import PackageClass
from smelt.tasks.text_to_text import TextToText

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings
    from smelt.tasks.samples import EncodedSample


class SpeechRecognition(TextToText):
    """Speech recognition."""

    name = "speech-recognition"
    column_roles = ("audio", "transcript")
    target_roles = ("transcript", "references")
    input_roles = ("audio",)
    method = "transcribe"
    command_input = "SPEECH.wav"
    call = "audio file to text"
    call_includes = "reading files, spectrograms and detokenizing are"
    sample_noun = "audio file"
    rate_unit = "files/s"
    preprocessing = "spectrograms"
    preprocessing_libraries = ("soundfile",)
    row_example = '{"audio": "FILE", "text": "..."}'
    suggested_metrics = ("wer", "cer")
    main_metric = "wer"
    hub_tag = "automatic-speech-recognition"
    package = PackageClass(
        "speech_recognition",
        "SpeechRecognizer",
        'print(SpeechRecognizer()(["speech.wav"]))',
        ("soundfile", "cffi", "pycparser", "scipy"),
        "audio/wav",
    )

    def read_rows(self, path: Path, columns: Columns) -> RowIterator:
        """Yield rows with the path of a file, as `TaskSpec.read_rows`."""
        return read_media_rows(path, columns.audio)

    def check_input(self, text: str, location: str) -> None:
        """Check the header of a file of audio."""
        check_audio(text, location)

    def parse_row(
        self, row: Mapping[str, Any], location: str, columns: Columns, lacks_target: bool
    ) -> Example:
        """Return the sample of a row, as `TaskSpec.parse_row`."""
        references: tuple[str, ...] = ()
        if not lacks_target:
            names = (columns.references, columns.transcript)
            references = parse_references(row, location, *names, "transcript")
        reference = text_of_column(row, columns.audio, location, "audio")
        check_audio(reference, location)
        return Example(reference, references)

    def required_roles(self, row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the roles of the columns that `row` must have: a list of transcripts replaces one."""
        return ("audio",) if columns.references in row else ("audio", "transcript")

    def placeholder_row(self, text: str, config: Mapping[str, Any]) -> None:
        """Return None: audio cannot be written as text."""

    def encode(
        self, split: Split, config: Any, tokenizer: Any, limit: int, length: int | None
    ) -> tuple[list[EncodedSample], int]:
        """Return a sample for each transcript of each file, as `TaskSpec.encode`.

        tokenizer: the model's `SpeechProcessor`.
        """
        from smelt.runtimes.audio import split_audio
        from smelt.tasks.audio_samples import AudioSample

        inputs = split_audio(split)
        owners = [i for i, example in enumerate(split.examples) for _ in example.references]
        transcripts = [reference for example in split.examples for reference in example.references]
        targets, truncated = tokenizer.targets(transcripts, limit)
        return [
            AudioSample([], None, ids, audio=inputs[i], features=tokenizer.features)
            for i, ids in zip(owners, targets, strict=True)
        ], truncated

    def package_settings(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return the sizes of a spectrogram, and of the decoder's prompt."""
        from smelt.generation.config import GenerationSettings, resolve_generation
        from smelt.generation.runner import read_model_files
        from smelt.runtimes.audio import SpeechFeatures

        language = read_json_object(folder / "generation_config.json").get("language")
        model: Any = read_model_files(folder)
        decoding = resolve_generation(GenerationSettings(language=language), model)
        return {
            "speech": {
                "mel_bins": config["num_mel_bins"],
                "window_samples": SpeechFeatures(config).window_samples,
                "prompt_tokens": len(decoding.decoder_prompt),
            }
        }

    def count_truncated(
        self, runner: Any, examples: Sequence[Example], generation: GenerationSettings
    ) -> int:
        """Return 0: long audio is cut into windows."""
        return 0

    def too_long_samples(self, split: Split, tokenizer: Any, limit: int) -> set[int]:
        """Return the samples with a transcript of more than `limit` tokens."""
        return {
            i for i, example in enumerate(split.examples) if tokenizer.targets(example.references, limit)[1]
        }


TASK = SpeechRecognition()
