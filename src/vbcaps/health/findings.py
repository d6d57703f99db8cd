"""What a record of health says, in sentences."""

from vbcaps.health.record import Health

AGREES = 0.9  # share of answers with the most votes from which on routing is called one by agreement
EVEN = 1e-4  # sharpness up to which routing is uniform
FAINT = 0.05  # and nearly uniform
SETTLED = 0.95  # share of answers that stay the same with ten iterations from which on routing settles
ALIKE = 0.95  # correlation from which on two maps are alike
TELLS = 0.05  # of R^2, below which a readout tells nothing


def findings(found: Health) -> list[str]:
    """Return one sentence for each finding, the most important first."""
    said = [
        *of_votes(found),
        *of_posterior(found),
        *of_routing(found),
        *of_maps(found),
        *of_poses(found),
        *of_moves(found),
        *of_iterations(found),
        *of_uniform(found),
        *of_types(found),
    ]
    return [sentence[0].upper() + sentence[1:] for sentence in said]


def share(value: float) -> str:
    """Return a share in percent, without a digit that a few hundred images cannot tell."""
    return f"{100 * value:.0f}%"


def of_votes(found: Health) -> list[str]:
    """Say whether votes decide the answer."""
    who = "the answer is the class" if found.objects == 1 else f"the {found.objects} answers are the classes"
    most, fewest, even = found.most_votes, found.fewest_votes, 1 / len(found.votes_by_rank)
    if most == fewest == 0 and abs(found.votes_by_rank[0] - even) < 1e-3 * even:
        return ["all classes have equally many votes, so votes do not decide the answer"]
    if found.inverted:
        return [
            f"routing is inverted: {who} with the fewest votes for {share(fewest)} of images, and with the most for "
            f"{share(most)}"
        ]
    said = f"{who} with the most votes for {share(most)} of images"
    return [f"{said}: routing by agreement" if most >= AGREES else f"{said}: votes decide it only in part"]


def of_posterior(found: Health) -> list[str]:
    """Say whether the answer has the tightest posterior."""
    if found.tightest is None:
        return []
    who = "the class of the answer has the tightest posterior"
    if found.objects > 1:
        who = f"the classes of the {found.objects} answers have the tightest posteriors"
    return [f"{who} for {share(found.tightest)} of images"]


def of_routing(found: Health) -> list[str]:
    """Say how sharp routing is, and how much of it depends on the image."""
    routed = [one for one in found.layers if one.sharpness is not None]
    if not routed:
        return []
    sharpest = max(routed, key=lambda one: one.sharpness or 0)
    sharpness, information = sharpest.sharpness or 0.0, sharpest.information_share or 0.0
    if sharpness <= EVEN:
        return ["routing is uniform: every child is shared out evenly among the parents that see it"]
    said = f"routing is {share(sharpness)} sharp in {sharpest.name}, where it is sharpest"
    if sharpness <= FAINT:
        said = f"routing is nearly uniform: at most {100 * sharpness:.1f}% sharp, in {sharpest.name}"
    return [f"{said}; the image decides {share(information / sharpness)} of this"]


def of_maps(found: Health) -> list[str]:
    """Say whether classes take different parts of the image."""
    if found.parts is None:
        return []
    what = "take the same parts of the image" if found.parts >= ALIKE else "take different parts of the image"
    return [f"the first and the last class {what}: these correlate by {found.parts:.2f}"]


def of_poses(found: Health) -> list[str]:
    """Say how many entries of the winner's pose move with the image."""
    if found.moving is None or found.moving_others is None:
        return []
    of = f"{found.entries} entries of the winner's pose"
    if found.moving < 1:
        return [f"poses are dead: {found.moving:.1f} of {of} move with the image"]
    if found.moving_others < 1:
        return [f"poses are dead but for the added coordinates: {found.moving:.1f} of {of} move with the image"]
    return [f"{found.moving:.1f} of {of} move with the image ({found.moving_others:.1f} of those without coordinates)"]


def of_moves(found: Health) -> list[str]:
    """Say how well poses follow a known move."""
    moves, said = found.moves, []
    for what, r2, others in (
        ("shifts", moves.shift, moves.shift_others),
        ("rotations", moves.angle, moves.angle_others),
    ):
        if r2 is None or others is None:
            continue
        explained, without = ("none" if one < TELLS else share(one) for one in (r2, others))
        said.append(f"{explained} of the variance of {what} ({without} without the entries with coordinates)")
    return [f"a linear readout of the winner's pose explains {' and '.join(said)}"] if said else []


def of_iterations(found: Health) -> list[str]:
    """Say whether routing settles."""
    if not found.at_iterations or found.iters is None or found.at_iterations[-1].iters <= found.iters:
        return []
    last = found.at_iterations[-1]
    settles = "settles" if last.same >= SETTLED else "does not settle"
    return [
        f"routing {settles}: with {last.iters} iterations {share(last.same)} of answers are those of the {found.iters} "
        "that the network was trained with"
    ]


def of_uniform(found: Health) -> list[str]:
    """Say what routing is worth."""
    one = found.uniform
    if one is None or one.error is None or one.as_trained is None:
        return []
    return [
        f"with uniform routing, and BatchNorm's statistics taken anew, {share(one.error)} of answers are wrong, and "
        f"{share(one.as_trained)} as trained"
    ]


def of_types(found: Health) -> list[str]:
    """Say which types are starved."""
    said = []
    for one in found.layers:
        kinds = ((one.never_on, "never on"), (one.always_on, "always on"), (one.untaught, "without a gradient"))
        if which := [f"{count} {kind}" for count, kind in kinds if count]:
            said.append(f"{', '.join(which)} in {one.name} (of {one.types})")
    if not said:
        return ["no type of capsule is starved: each is on in some images and off in others, and has gradients"]
    return [f"types of capsule that are starved: {'; '.join(said)}"]
