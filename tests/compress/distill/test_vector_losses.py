"""The loss of a student of vectors: its parts, weighed, from the same batch."""

import pytest
import torch

from smelt.compress.distill.objective import DistillObjective, pairwise_similarity_loss, vector_distance_loss
from smelt.compress.distill.settings import DistillSettings
from smelt.models.checkpoint import load_model
from smelt.training.extension import total_loss
from smelt.training.losses import cosent_loss
from tests.support.models import embedders


@pytest.mark.parametrize("explicit", [
    {}, {"sentence_embedding": 0}, {"pairwise_similarity": 0.25, "cosent": 2.0},
    {"sentence_embedding": 0, "pairwise_similarity": 0, "cosent": 1},
])  # fmt: skip
def test_embedding_losses_are_weighted_with_defaults(explicit, tmp_path):
    teacher, _ = load_model(embedders.write_embedder(tmp_path / "teacher"))
    student, _ = load_model(embedders.write_embedder(tmp_path / "student", seed=1))
    ids = torch.randint(5, 20, (6, 7), generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([[1.0], [0.0], [2.0]]),
    }
    with torch.no_grad():
        loss = total_loss(DistillObjective(teacher, DistillSettings(losses=explicit))(student, batch))
        student_vectors, teacher_vectors = (m(ids).sentence_embedding for m in (student, teacher))
    weights = {"sentence_embedding": 1.0, "pairwise_similarity": 1.0, "cosent": 0.0} | explicit
    expected = (
        weights["sentence_embedding"] * vector_distance_loss(student_vectors, teacher_vectors)
        + weights["pairwise_similarity"] * pairwise_similarity_loss(student_vectors, teacher_vectors)
        + weights["cosent"] * cosent_loss(student_vectors, batch["labels"])
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(loss) > 0
