"""The model against its definition, written out row by row."""

import pytest

torch = pytest.importorskip("torch")

from intune.recsys.dlrm import DLRM  # noqa: E402

ROWS = (5, 3, 7)


@pytest.fixture
def model() -> DLRM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return DLRM(ROWS, dense_features=2, dim=4, bottom=(6,), top=(5,))


def test_a_logit_is_that_of_the_paper_row_by_row(model: DLRM) -> None:
    dense = torch.tensor([[0.5, 2.0], [0.0, 0.0], [1.0, -1.0]])
    sparse = torch.tensor([[0, 0, 0], [4, 2, 6], [1, 1, 3]])
    tables = torch.split(model.tables.weight, list(ROWS))
    for row, logit in enumerate(model(dense, sparse)):
        x = model.bottom(dense[row])
        vectors = [x, *(table[index] for table, index in zip(tables, sparse[row], strict=True))]
        products = [torch.dot(vectors[i], vectors[j]) for i in range(4) for j in range(i)]
        expected = model.top(torch.cat([x, torch.stack(products)]))
        torch.testing.assert_close(logit, expected.squeeze())


def test_tables_start_within_their_bounds(model: DLRM) -> None:
    for table, rows in zip(torch.split(model.tables.weight, list(ROWS)), ROWS, strict=True):
        assert table.abs().max() <= rows**-0.5
        assert table.std() > 0.3 * rows**-0.5


def test_only_rows_that_were_looked_up_get_a_gradient(model: DLRM) -> None:
    model(torch.ones(2, 2), torch.tensor([[1, 2, 0], [1, 0, 6]])).sum().backward()
    gradient = model.tables.weight.grad
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[1, 5, 7, 8, 14]]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_it_learns_what_only_a_pair_of_categories_tells(optimizer: type) -> None:
    # The label is whether two categories are equal: neither alone says anything, their product does.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DLRM((4, 4), dense_features=1, dim=8, bottom=(4,), top=(16,))
        sparse = torch.randint(0, 4, (512, 2))
    label = (sparse[:, 0] == sparse[:, 1]).float()
    dense = torch.zeros(512, 1)
    steps = optimizer(model.parameters(), lr=0.1)
    loss_of = torch.nn.BCEWithLogitsLoss()
    with torch.sparse.check_sparse_tensor_invariants(False):
        for _ in range(300):
            steps.zero_grad()
            loss_of(model(dense, sparse), label).backward()
            steps.step()
    predicted = model(dense, sparse) > 0
    assert (predicted == label.bool()).all()


def test_the_same_seed_gives_the_same_model_and_leaves_no_global_trace(model: DLRM) -> None:
    state = torch.random.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        again = DLRM(ROWS, dense_features=2, dim=4, bottom=(6,), top=(5,))
    assert torch.equal(state, torch.random.get_rng_state())
    for name, weights in model.state_dict().items():
        assert torch.equal(weights, again.state_dict()[name])
