"""AMC: the agent's updates by hand, actions that meet the budget, and a layer that can go."""

import copy
from typing import Any

import pytest
import torch
from learned_digits import SCHEDULE, accuracy, digits
from torch import Tensor, nn

import sosp
from sosp.baselines.amc_agent import Agent, AgentConfig, AgentTransition, draw_truncated_normal, update_target_network
from sosp.baselines.amc_budget import AmcBudget, build_budget
from sosp.baselines.amc_features import STATE_SIZE, extract_features
from sosp.baselines.amc_search import Episode, EpisodeRunner, list_transitions
from sosp.errors import ArgumentError

X = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(2, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 10, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(10, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            *(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)),
        ).eval()


def budget(macs: float = 0.5, least: float = 0.2) -> AmcBudget:
    model = network()
    found = sosp.find_structures(model, X)
    return build_budget(found, sosp.score(model, None, method="magnitude-l1", structures=found).scores, macs, least)


def by_hand(kept: list[int]) -> int:
    """MACs of ``network`` with so many outputs of its four hidden layers."""
    a, b, c, d = kept
    return 64 * 9 * 2 * a + 16 * 9 * a * b + 16 * b * c + c * d + 3 * d


# --- the agent


def agent(habits: AgentConfig) -> Agent:
    return Agent(2, 50, generator(), habits)


def batch(n: int = 6) -> AgentTransition:
    g = generator(1)
    state, following = torch.rand(n, 2, generator=g), torch.rand(n, 2, generator=g)
    action, reward = torch.rand(n, 1, generator=g), torch.rand(n, 1, generator=g)
    return AgentTransition(state, action, reward, following, torch.tensor([[0.0], [1.0]] * (n // 2)))


def test_targets_by_hand() -> None:
    """Rewards less their moving average, and what the twins expect, unless it was the end."""
    one, b = agent(AgentConfig(hidden=3, discount=0.9, blend=0.25)), batch()
    with torch.no_grad():
        ahead = one.slow_critic(torch.cat([b.following, one.slow_actor(b.following)], 1))
    mean = b.reward.mean()
    torch.testing.assert_close(one.targets(b), b.reward - mean + 0.9 * (1 - b.last) * ahead)
    doubled = b._replace(reward=2 * b.reward)
    usual = mean + 0.25 * (2 * mean - mean)
    torch.testing.assert_close(one.targets(doubled), 2 * b.reward - usual + 0.9 * (1 - b.last) * ahead)


def test_the_twins_follow_slowly() -> None:
    slow, fast = nn.Linear(2, 2), nn.Linear(2, 2)
    wanted = [0.9 * a.detach() + 0.1 * b.detach() for a, b in zip(slow.parameters(), fast.parameters(), strict=True)]
    update_target_network(slow, fast, 0.1)
    for a, b in zip(slow.parameters(), wanted, strict=True):
        torch.testing.assert_close(a.detach(), b)


def test_a_lesson_by_hand() -> None:
    """The critic by the squared error, then the actor up the new critic, then the twins a hundredth of the way."""
    habits = AgentConfig(hidden=4, batch=6)
    one = agent(habits)
    two: Any = copy.deepcopy({n: getattr(one, n) for n in ("actor", "critic", "slow_actor", "slow_critic")})
    b = batch()
    for k in range(6):
        one.remember(AgentTransition(*(x[k] for x in b)))
    one.learn()

    with torch.no_grad():
        ahead = two["slow_critic"](torch.cat([b.following, two["slow_actor"](b.following)], 1))
        target = b.reward - b.reward.mean() + (1 - b.last) * ahead
    adam = torch.optim.Adam(two["critic"].parameters(), 1e-3)
    (two["critic"](torch.cat([b.state, b.action], 1)) - target).square().mean().backward()
    adam.step()
    adam = torch.optim.Adam(two["actor"].parameters(), 1e-4)
    (-two["critic"](torch.cat([b.state, two["actor"](b.state)], 1)).mean()).backward()
    adam.step()
    for name in ("actor", "critic"):
        with torch.no_grad():
            for slow, fast in zip(two[f"slow_{name}"].parameters(), two[name].parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
    for name, wanted in two.items():
        for mine, theirs in zip(getattr(one, name).parameters(), wanted.parameters(), strict=True):
            # Sums over the six in another order; Adam divides slopes by their size.
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("best", [0.3, 0.7])
def test_it_learns_what_pays(best: float) -> None:
    one = Agent(1, 300, generator(), AgentConfig(hidden=64, actor_rate=1e-3, critic_rate=1e-2, batch=32))
    state, end = torch.ones(1), torch.ones(1)
    for step in range(300):
        action = one.explore() if step < 60 else one.act(state, 0.2)
        reward = torch.tensor([1 - 4 * (action - best) ** 2])
        one.remember(AgentTransition(state, torch.tensor([action]), reward, state, end))
        if step >= 60:
            one.learn()
    assert float(one.actor(state).detach()) == pytest.approx(best, abs=0.12)


@pytest.mark.parametrize(("mean", "deviation"), [(0.5, 0.5), (0.95, 0.5), (0.02, 0.1), (0.5, 1e-4)])
def test_truncated_normal(mean: float, deviation: float) -> None:
    g = generator()
    drawn = torch.tensor([draw_truncated_normal(mean, deviation, g) for _ in range(2000)], dtype=torch.float64)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1
    a, b = (0 - mean) / deviation, (1 - mean) / deviation
    normal = torch.distributions.Normal(0.0, 1.0)
    ends = torch.tensor([a, b])
    weight = normal.cdf(ends).diff()
    wanted = mean - deviation * float(normal.log_prob(ends).exp().diff() / weight)
    # Five deviations of the mean of 2000.
    assert float(drawn.mean()) == pytest.approx(wanted, abs=5 * min(deviation, 0.3) / 2000**0.5)


def test_memories_are_drawn_without_repetition_where_there_are_enough() -> None:
    one = agent(AgentConfig(hidden=2, batch=5))
    for k in range(7):
        one.remember(AgentTransition(*(x[k % 6] for x in batch()))._replace(reward=torch.tensor([float(k)])))
    assert len(set(one._recall().reward.flatten().tolist())) == 5
    assert len(one.memory) == 7


# --- the budget


def test_counts_are_those_of_the_network_that_is_built() -> None:
    b = budget()
    assert b.whole == by_hand([12, 10, 8, 7])
    for kept in ([12, 10, 8, 7], [3, 10, 2, 7], [5, 4, 8, 1]):
        assert b.left(kept) == by_hand(kept)
        mask = sosp.Mask.from_structures(b.structures, b.removed(kept))
        assert sosp.count(network(), X, mask).macs == by_hand(kept)


def test_the_largest_norms_stay() -> None:
    b = budget()
    norms = network()[0].weight.detach().flatten(1).abs().sum(1)
    assert b.removed([9, 10, 8, 7]).tolist() == norms.argsort()[:3].tolist()
    assert b.fewest == (3, 2, 2, 2)  # a fifth, rounded up


@pytest.mark.parametrize("macs", [0.15, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("before", [[], [3], [12], [6, 5], [7, 2, 8]])
def test_an_action_is_cut_to_what_fits(macs: float, before: list[int]) -> None:
    b = budget(macs)
    t = len(before)
    rest = list(b.fewest[t + 1 :])

    def fits(n: int) -> bool:
        return by_hand([*before, n, *rest]) <= macs * by_hand([12, 10, 8, 7])

    if not fits(b.fewest[t]):
        return
    for wish in range(b.widths[t] + 1):
        wanted = max([n for n in range(b.fewest[t], wish + 1) if fits(n)], default=b.fewest[t])
        assert b.fitting(before, wish) == (wanted, by_hand([*before, wanted, *rest]))


@pytest.mark.parametrize("kept", [4, 7, 11])
def test_what_fits_exactly_fits(kept: int) -> None:
    b = budget(by_hand([kept, 2, 2, 2]))
    assert b.fitting([], 12) == (kept, b.limit)


def test_an_action_is_the_share_that_stays() -> None:
    b = budget(1.0)
    walker = EpisodeRunner(b, extract_features(network(), X, b), generator())
    walker.agent.explore = lambda: 0.75  # type: ignore[method-assign]
    assert walker.walk(None).kept == (9, 8, 6, 5)  # of 12, 10, 8, 7
    walker.agent.act = lambda state, noise: 0.0  # type: ignore[method-assign]
    assert walker.walk(0.5).kept == b.fewest


@pytest.mark.parametrize("macs", [0.15, 0.4, 0.7])
def test_every_walk_meets_the_budget(macs: float) -> None:
    b = budget(macs)
    walker = EpisodeRunner(b, extract_features(network(), X, b), generator())
    for noise in (None, None, None, 0.5, 0.1):
        walk = walker.walk(noise)
        assert by_hand(list(walk.kept)) <= macs * b.whole
        assert all(k >= low for k, low in zip(walk.kept, b.fewest, strict=True))


def test_a_budget_that_cannot_be_met() -> None:
    lowest = by_hand([3, 2, 2, 2])
    with pytest.raises(ArgumentError, match=rf"macs=0.05 cannot be met.*least=0.2, {lowest:,} of .*lower least"):
        sosp.learned.amc(network(), (X, Y), macs=0.05)


# --- what it sees


def test_the_eleven_numbers() -> None:
    b = budget()
    seen = extract_features(network(), X, b)
    work = [64 * 9 * 2 * 12, 16 * 9 * 12 * 10, 16 * 10 * 8, 8 * 7]
    raw = torch.tensor(
        [  # t, n, c, h, w, stride, k, MACs
            [0, 12, 2, 8, 8, 1, 3, work[0]],
            [1, 10, 12, 8, 8, 2, 3, work[1]],
            [2, 8, 10, 4, 4, 1, 1, work[2]],
            [3, 7, 8, 1, 1, 0, 1, work[3]],
        ]
    )
    scaled = (raw - raw.amin(0)) / (raw.amax(0) - raw.amin(0))
    for t in range(4):
        rest = torch.tensor([0.25, sum(work[t + 1 :]) / b.whole, 0.5])
        torch.testing.assert_close(seen.state(t, 0.25, 0.5), torch.cat([scaled[t], rest]))
    assert len(seen.state(0, 0.0, 1.0)) == STATE_SIZE


def test_what_a_walk_tells_the_next_layer() -> None:
    b = budget(0.4)
    walk = EpisodeRunner(b, extract_features(network(), X, b), generator(3)).walk(None)
    assert walk.states[0][-3] == 0
    assert walk.states[0][-1] == 1
    for t in range(1, 4):
        left = by_hand([*walk.kept[:t], *b.fewest[t:]])
        assert float(walk.states[t][-3]) == pytest.approx(1 - left / b.whole, abs=1e-6)
        assert float(walk.states[t][-1]) == pytest.approx(walk.kept[t - 1] / b.widths[t - 1], abs=1e-6)


def test_every_step_gets_the_reward_of_the_whole_walk() -> None:
    states = tuple(torch.full((2,), float(t)) for t in range(3))
    found = list_transitions(Episode(states, (0.1, 0.2, 0.3), (1, 1, 1)), 0.7)
    assert [float(t.reward) for t in found] == pytest.approx([0.7] * 3)
    assert [float(t.action) for t in found] == pytest.approx([0.1, 0.2, 0.3])
    assert [float(t.following[0]) for t in found] == [1, 2, 2]
    assert [float(t.last) for t in found] == [0, 0, 1]


# --- the search


def test_a_seed_decides_and_nothing_changes() -> None:
    model = network()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    one, same, other = (sosp.learned.amc(model, (X, Y), episodes=5, warmup=2, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one != other
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert sosp.count(model, X, one).macs <= 0.5 * sosp.count(model, X).macs


def test_batches_of_a_loader_will_do() -> None:
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    found = sosp.learned.amc(network(), batches, episodes=3, warmup=1, examples=5)
    assert found == sosp.learned.amc(network(), [(X[:4], Y[:4]), (X[4:5], Y[4:5])], episodes=3, warmup=1)


@pytest.mark.parametrize(
    "options", [{"episodes": 0}, {"warmup": -1}, {"least": 1.5}, {"macs": 1.5}, {"macs": 0.0}, {"examples": 0}]
)
def test_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        sosp.learned.amc(network(), (X, Y), **options)


def slim(first: int) -> nn.Sequential:
    convs = [nn.Conv2d(1, first, 3, padding=1, bias=False), nn.Conv2d(first, 8, 3, stride=2, padding=1, bias=False)]
    return nn.Sequential(
        *(convs[0], nn.BatchNorm2d(first), nn.ReLU(), convs[1], nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)),
    )


def with_idle_filters() -> nn.Module:
    """A network that knows the digits with 8 filters in front, and 24 more that are zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small: Any = sosp.train(slim(8), digits(), SCHEDULE).model
        large: Any = slim(32).eval()
    with torch.no_grad():
        for name, mine in large.state_dict().items():
            theirs: Tensor = small.state_dict()[name]
            if mine.shape != theirs.shape:
                mine.zero_()
                mine[tuple(slice(n) for n in theirs.shape)] = theirs
            else:
                mine.copy_(theirs)
        large[1].running_var[8:] = 1
    return large


def test_on_digits_it_finds_the_layer_that_can_go() -> None:
    model = with_idle_filters()
    example = torch.randn(2, 1, 8, 8)
    mask = sosp.learned.amc(model, digits(), macs=0.4, episodes=40, warmup=20, examples=400)
    assert sosp.count(model, example, mask).macs <= 0.4 * sosp.count(model, example).macs
    structures = sosp.find_structures(model, example)
    norms = sosp.score(model, None, method="magnitude-l1", structures=structures)
    uniform = accuracy(model, sosp.select(norms, macs=0.4))  # the same share of every layer
    # Seen, with four seeds: 0.88 to 0.97 against 0.66.
    assert accuracy(model, mask) > uniform + 0.15
