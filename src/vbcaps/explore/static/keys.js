// Keys: one stop of the Tab key for a group of things, and the arrow keys within it.

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * Let the arrow keys move within a group.
 *
 * @param group     the element that holds the things
 * @param selector  finds the things in it
 * @param choose    whether a thing is chosen as soon as the keys reach it
 */
export function arrows(group, selector, choose = false) {
  // Browsers put an SVG that listens for focus on the way of the Tab key.
  if (group instanceof SVGElement) group.setAttribute("tabindex", "-1");
  group.addEventListener("keydown", (event) => {
    const here = event.target.closest(selector);
    if (!here) return;
    if ((event.key === "Enter" || event.key === " ") && here.tagName !== "BUTTON") {
      event.preventDefault();
      press(here);
    }
    const step = STEPS[event.key];
    const there = step && nearest(here, [...group.querySelectorAll(selector)], step);
    if (!step) return;
    event.preventDefault();
    if (!there) return;
    there.focus();
    if (choose) press(there);
  });
  group.addEventListener("focusin", (event) => {
    const here = event.target.closest(selector);
    if (here) stop(group, selector, here);
  });
}

const press = (node) => node.dispatchEvent(new MouseEvent("click", { bubbles: true }));

/** Make one thing of a group the stop of the Tab key. */
export function stop(group, selector, chosen) {
  const all = [...group.querySelectorAll(selector)];
  const only = chosen ?? all[0];
  for (const one of all) one.setAttribute("tabindex", one === only ? "0" : "-1");
}

/** Return the nearest thing in a direction; what lies aside counts as further away. */
function nearest(here, all, [dx, dy]) {
  const middle = (node) => {
    const box = node.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const [x, y] = middle(here);
  let best = null;
  let least = Infinity;
  for (const one of all) {
    const [px, py] = middle(one);
    const ahead = (px - x) * dx + (py - y) * dy;
    const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
    if (ahead > 1 && ahead + 3 * aside < least) [best, least] = [one, ahead + 3 * aside];
  }
  return best;
}
