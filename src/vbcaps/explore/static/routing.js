// The routing panel: which parts a parent takes and where its votes lie, by iteration and network; and the ELBO.

import { best, routingOf } from "./answer.js";
import { Sheet, brief, ellipse, heat, heatMap, number, path, percent, picture, roomIn, round, unitOf } from "./draw.js";
import { arrows, stop } from "./keys.js";

const DEVIATIONS = 2; // of the ellipses
const TERMS = [
  ["total", "*L*(*q*)"],
  ["likelihood", "E[ln *p*(*v* | *z*, *μ*, *Λ*)]"],
  ["assignment", "+ E[ln *p*(*z* | *π*)]"],
  ["responsibility", "+ H[*q*(*z*)]"],
  ["kl_pi", "− KL[*q*(*π*) ‖ *p*(*π*)]"],
  ["kl_parameters", "− KL[*q*(*μ*, *Λ*) ‖ *p*(*μ*, *Λ*)]"],
];
const PARTS_AND_VOTES =
  "The heat maps show from which parts of the image the mean <i>m<sub>j</sub></i> of the parent comes, and the clouds " +
  "its votes <i>V<sub>j|i</sub></i>, of area <i>R<sub>ij</sub></i> = <i>a<sub>i</sub></i> <i>r<sub>ij</sub></i>";
const SAYS = {
  vb:
    `${PARTS_AND_VOTES}, with their covariance E[<i>Λ<sub>j</sub></i>]<sup>−1</sup> as a line and that of ` +
    "<i>μ<sub>j</sub></i> filled, at two deviations.",
  em: `${PARTS_AND_VOTES}, with EM's variance <i>σ<sub>j</sub></i><sup>2</sup> as an ellipse at two deviations.`,
  dynamic: `${PARTS_AND_VOTES}; Dynamic routing gives them no spread.`,
  several:
    `${PARTS_AND_VOTES}; VB draws their covariance E[<i>Λ<sub>j</sub></i>]<sup>−1</sup> as a line and that of ` +
    "<i>μ<sub>j</sub></i> filled, EM its variance, both at two deviations, and Dynamic has neither.",
  printed:
    " This network has the rule of activation that the paper prints, in which agreement lowers the activation. Its " +
    "answer usually took the fewest votes, so these are not the parts that the answer was made of.",
  none: "A CNN has no capsules and routes nothing; choose a network with capsules to see its routing.",
};

/** Tabs of layers, a list of classes, and maps of activations: what chooses the parent. */
export class Chooser {
  constructor(app) {
    this.app = app;
    this.layers = document.getElementById("layers");
    this.classes = document.querySelector("#parent-class select");
    this.map = document.getElementById("map");
    this.sheet = new Sheet(this.map);
    this.layers.addEventListener("click", (event) => {
      const tab = event.target.closest("[data-layer]");
      if (tab) app.choose({ layer: tab.dataset.layer, position: null, type: null });
    });
    this.classes.addEventListener("change", () => {
      app.choose({ layer: null, position: null, type: this.classes.value === "" ? null : Number(this.classes.value) });
    });
    this.map.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-parent]");
      if (!cell) return;
      const [position, type] = cell.dataset.parent.split(",").map(Number);
      app.choose({ layer: app.parent.layer, position, type });
    });
    arrows(this.layers, "[data-layer]", true);
    arrows(this.map, "[data-parent]", true);
    new ResizeObserver(() => this.draw()).observe(document.getElementById("parent"));
  }

  load(model) {
    const tab = ({ name }) => {
      const made = document.createElement("button");
      Object.assign(made, { type: "button", textContent: name });
      made.setAttribute("role", "tab");
      made.dataset.layer = name;
      return made;
    };
    this.layers.replaceChildren(...model.layers.map(tab));
    this.classes.replaceChildren(new Option("", ""), ...model.classes.map((name, j) => new Option(name, j)));
  }

  draw() {
    const { app } = this;
    const { parent, state, model } = app;
    const ofClasses = parent?.layer === "class_caps";
    document.getElementById("parent-class").hidden = !ofClasses;
    this.map.toggleAttribute("hidden", !parent || ofClasses);
    document.getElementById("chosen").textContent = parent && !ofClasses ? app.nameOf(parent) : "";
    if (!parent) return;
    for (const tab of this.layers.children) tab.setAttribute("aria-selected", tab.dataset.layer === parent.layer);
    stop(this.layers, "[data-layer]", this.layers.querySelector("[aria-selected=true]"));
    if (ofClasses) {
      this.classes.options[0].text = state.type === null ? `the answer: ${app.nameOf(parent)}` : "the answer";
      this.classes.value = state.type ?? "";
    } else this.drawMap(model.layers.find((one) => one.name === parent.layer), parent);
  }

  /** Draw a small map for each type, as many in a row as makes the cells largest. */
  drawMap({ name, rows, columns, types }, parent) {
    const { routing, routed } = this.app.answers;
    if (!routing || routed.layer !== name) return;
    const unit = unitOf(this.map);
    const width = roomIn(document.getElementById("parent"));
    const gap = 10 * unit;
    const room = Math.min(Math.max(window.innerHeight * (types * columns > 128 ? 0.3 : 0.18), 90), 260);
    const head = 16 * unit;
    const sizes = [1, 2, 3, 4].map((lines) =>
      Math.min((width / Math.ceil(types / lines) - gap) / columns, ((room - head) / lines - gap) / rows, 20 * unit),
    );
    const cell = Math.max(...sizes);
    const inLine = Math.ceil(types / (sizes.indexOf(cell) + 1));
    const most = Math.max(...routing.activations.flat());
    const height = head + Math.ceil(types / inLine) * (rows * cell + gap);
    this.sheet.draw(width, round(height), (sheet) => {
      let frame = null;
      const title = `Activations *a*_{j} of ${name}, from 0 to ${number(most)}: a map for each type`;
      sheet.text("title", 0, 12 * unit, title, { class: "quiet" });
      for (let type = 0; type < types; type += 1) {
        const x = (type % inLine) * (columns * cell + gap);
        const y = head + Math.floor(type / inLine) * (rows * cell + gap);
        for (let position = 0; position < rows * columns; position += 1) {
          const [row, column] = [Math.floor(position / columns), position % columns];
          const activation = routing.activations[position][type];
          const chosen = position === parent.position && type === parent.type;
          sheet.rect(`${position},${type}`, x + column * cell, y + row * cell, cell, cell, {
            class: chosen ? "place chosen" : "place",
            fill: heat(activation / (most || 1)),
            role: "button",
            "data-parent": `${position},${type}`,
            "aria-pressed": chosen,
            "aria-label": `type ${type + 1}, row ${row + 1}, column ${column + 1}: activation ${number(activation)}`,
          });
          if (chosen) frame = [x + column * cell, y + row * cell, cell, cell];
        }
      }
      if (frame) sheet.rect("frame.below", ...frame, { class: "frame below" });
      if (frame) sheet.rect("frame", ...frame, { class: "frame" });
    });
    if (!this.map.contains(document.activeElement)) stop(this.map, "[data-parent]", this.map.querySelector(".place.chosen"));
  }
}

export class RoutingPanel {
  constructor(app) {
    this.app = app;
    this.room = document.getElementById("routing-room");
    this.svg = document.getElementById("routes");
    this.sheet = new Sheet(this.svg);
    new ResizeObserver(() => this.draw()).observe(this.room);
  }

  load({ routing }) {
    this.say(routing ?? "none");
  }

  say(what) {
    const printed = this.app.model?.printed_rule ? SAYS.printed : "";
    document.getElementById("routing-says").innerHTML = SAYS[what] + printed;
  }

  draw() {
    const { look, routing } = this.app.answers;
    this.svg.toggleAttribute("hidden", !routing);
    if (!look || !routing || !this.room.clientWidth) return;
    this.say(routing.networks.length > 1 ? "several" : routing.networks[0].routing);
    const unit = unitOf(this.svg);
    const plan = this.plan(routing.networks, unit);
    this.sheet.draw(plan.width, round(plan.height), (sheet) => {
      const most = Math.max(...routing.networks.flatMap((one) => one.parts.flat(2)));
      this.heads(sheet, plan, unit, most);
      routing.networks.forEach((network, n) => this.network(sheet, network, n, plan, unit, look, routing, most));
      const elbo = routing.networks.find((one) => one.elbo);
      if (elbo) this.elbo(sheet, elbo, plan, unit);
    });
  }

  /** Return where all goes: one network has its clouds below its heat maps, several have them beside. */
  plan(networks, unit) {
    const width = this.room.clientWidth - 2;
    const room = this.room.clientHeight - 4;
    const times = Math.max(...networks.map((one) => one.parts.length));
    const several = networks.length > 1;
    const columns = several ? 2 * times : times;
    const rows = several ? networks.length : 2;
    const [left, top, gap] = [78 * unit, 36 * unit, 8 * unit];
    const terms = networks.some((one) => one.elbo);
    const [aside, below] = terms ? [290 * unit, 124 * unit] : [0, 0];
    const size = (across, down) => Math.min((across - left) / columns - gap, (down - top) / rows - gap);
    const asideSize = size(width - aside, room);
    const belowSize = size(width, room - below);
    const cell = Math.max(asideSize, belowSize, 78 * unit);
    const isAside = asideSize >= belowSize;
    const [end, bottom] = [left + columns * (cell + gap), top + rows * (cell + gap)];
    const box = isAside
      ? { x: end + 12 * unit, y: top - 14 * unit, width: aside - 16 * unit, height: Math.min(bottom - top, 290 * unit) }
      : { x: 0, y: bottom + 6 * unit, width: Math.min(width, 700 * unit), height: below - 10 * unit };
    box.tall = isAside;
    const height = isAside ? Math.max(bottom, box.y + box.height) : bottom + below;
    return { width, height, cell, left, top, gap, times, several, box };
  }

  heads(sheet, { cell, left, top, gap, times, several }, unit, most) {
    const base = 12 * unit;
    const bar = 8 * unit;
    sheet.text("head.parts", left, base, "Parts that *m*_{j} comes from", { class: "heading" });
    for (let k = 0; k < 8; k += 1) {
      sheet.rect(`legend.${k}`, k * bar, base - 9 * unit, bar + 0.5, 8 * unit, { fill: heat((k + 0.5) / 8) });
    }
    sheet.text("legend.most", 0, base + 15 * unit, `0 – ${percent(most)}`, { class: "quiet" });
    const votes = left + times * (cell + gap);
    if (several) sheet.text("head.votes", votes, base, "Votes *V*_{j|i} and *m*_{j}", { class: "heading" });
    for (let t = 0; t < (several ? 2 : 1) * times; t += 1) {
      sheet.text(`time.${t}`, left + t * (cell + gap), top - 8 * unit, `iteration ${(t % times) + 1}`, { class: "quiet" });
    }
  }

  network(sheet, network, n, plan, unit, look, { field, frame }, most) {
    const { cell, left, top, gap, times, several } = plan;
    const y = top + (several ? n * (cell + gap) : 0);
    const explained = network.cloud.explained.reduce((sum, share) => sum + share, 0);
    const words = [
      [routingOf(network.routing), n ? "strong" : "strong first"],
      [`*a*_{j} = ${number(network.activation)}`, ""],
    ];
    const about = ["in a plane", `with ${percent(explained, 0)}`, "of variance"].map((line) => [line, "quiet"]);
    const say = (name, lines, from) =>
      lines.forEach(([line, look], k) => {
        sheet.text(`${n}.${name}.${k}`, 0, from + (13 + 17 * k) * unit, line, { class: look });
      });
    if (several) say("label", [...words, [`plane: ${percent(explained, 0)}`, "quiet"]], y);
    else {
      say("label", words, y);
      say("votes", [["votes", "strong"], ...about], y + cell + gap);
    }
    const scale = reach(network.cloud);
    network.parts.forEach((parts, t) => {
      const x = left + t * (cell + gap);
      this.parts(sheet, `${n}.${t}`, parts, x, y, cell, look, field, frame, most, `${network.name},${t + 1}`);
      const [cx, cy] = several ? [x + times * (cell + gap), y] : [x, y + cell + gap];
      this.cloud(sheet, `${n}.${t}`, network, t, cx, cy, cell, scale, unit);
    });
  }

  /** Draw the image, of two cameras the first, and over it the parts where their capsules see it. */
  parts(sheet, name, parts, x, y, cell, look, { top, left, bottom, right }, frame, most, heatName) {
    const camera = look.width / look.cameras;
    const across = cell / camera;
    const down = cell / look.height;
    const crop = { ...square(x, y, cell), viewBox: `0 0 ${camera} ${look.height}`, preserveAspectRatio: "none" };
    const inner = sheet.put(`${name}.crop`, "svg", crop);
    const all = { href: picture(look.picture), width: look.width, height: look.height, preserveAspectRatio: "none" };
    sheet.rect(`${name}.black`, 0, 0, camera, look.height, { fill: "#000" }, inner);
    sheet.put(`${name}.picture`, "image", { class: "pixels dim", ...all }, null, inner);
    const data = { "data-heat": heatName, "data-values": JSON.stringify(parts) };
    const group = sheet.put(`${name}.parts`, "g", data, null, inner);
    const size = [frame.right - frame.left, frame.bottom - frame.top];
    heatMap(sheet, `${name}.cell`, parts, frame.left, frame.top, ...size, most, group);
    const whole = top === 0 && left === 0 && bottom === look.height && right === camera;
    const box = [x + left * across, y + top * down, (right - left) * across, (bottom - top) * down];
    if (!whole) sheet.rect(`${name}.field`, ...box, { class: "field thin" });
  }

  /** Draw the votes with the area of their weight, the mean, and the two ellipses. */
  cloud(sheet, name, { name: network, cloud }, t, x, y, cell, scale, unit) {
    const frame = { ...square(x, y, cell), viewBox: `0 0 ${round(cell)} ${round(cell)}` };
    const inner = sheet.put(`${name}.cloud`, "svg", { ...frame, "data-cloud": `${network},${t + 1}` });
    sheet.rect(`${name}.frame`, 0.5, 0.5, cell - 1, cell - 1, { class: "cloud" }, inner);
    const zoom = (0.45 * cell) / scale.reach;
    const at = ([a, b]) => [cell / 2 + (a - scale.middle[0]) * zoom, cell / 2 - (b - scale.middle[1]) * zoom];
    const largest = Math.max(...cloud.weight.flat(), 1e-12);
    const radius = Math.max(0.045 * cell, 3 * unit);
    cloud.votes.forEach((vote, i) => {
      const [cx, cy] = at(vote).map(round);
      const r = round(radius * Math.sqrt(cloud.weight[t][i] / largest));
      sheet.put(`${name}.vote.${i}`, "circle", { class: "vote", cx, cy, r }, null, inner);
    });
    const mean = at(cloud.mean[t]);
    const oval = (which, covariance, look) => {
      const { long, short, turn } = ellipse(covariance, DEVIATIONS);
      const transform = `translate(${mean.map(round)}) rotate(${round(-turn)})`;
      const shape = { rx: round(long * zoom), ry: round(short * zoom), transform };
      sheet.put(`${name}.${which}`, "ellipse", { class: look, "data-ellipse": which, ...shape }, null, inner);
    };
    if (cloud.spread) oval("spread", cloud.spread[t], "spread");
    if (cloud.spread_of_mean) oval("spread_of_mean", cloud.spread_of_mean[t], "of-mean");
    const arm = 4 * unit;
    const [mx, my] = mean;
    const cross = path([[mx - arm, my], [mx + arm, my]]) + path([[mx, my - arm], [mx, my + arm]]);
    sheet.put(`${name}.mean`, "path", { class: "mean", d: cross }, null, inner);
  }

  /** Draw the evidence lower bound of the layer as a line, and its terms as a table. */
  elbo(sheet, { elbo, routing }, { box, several }, unit) {
    const { x, y, width, height, tall } = box;
    const of = (tall ? "" : " of the layer") + (several ? `, ${routingOf(routing)}` : "");
    const from = elbo[0].bound ? "" : ", from *t* = 2"; // at first a child in several fields counts more than once
    sheet.text("elbo.title", x, y + 12 * unit, `Evidence lower bound *L*(*q*)${of}${from}`, { class: "heading" });
    const top = y + 20 * unit;
    const plot = { x, y: top, width: tall ? width : width * 0.36, height: height - (tall ? 150 : 22) * unit };
    this.curve(sheet, elbo, plot, unit);
    const beside = plot.width + 20 * unit;
    const table = tall
      ? { x, y: top + plot.height + 6 * unit, width }
      : { x: x + beside, y: y - 2 * unit, width: width - beside };
    const column = 56 * unit;
    const end = (t) => table.x + table.width - (elbo.length - 1 - t) * column;
    elbo.forEach(({ bound }, t) => {
      sheet.text(`elbo.${t}`, end(t), table.y + 13 * unit, bound ? `t = ${t + 1}` : "no bound", { class: "end quiet" });
    });
    const { softness } = this.app.model;
    TERMS.forEach(([name, said], k) => {
      const often = number(1 / softness, Number.isInteger(1 / softness) ? 0 : 2);
      const words = name === "responsibility" && softness !== 1 ? `+ ${often} H[*q*(*z*)]` : said;
      const base = table.y + (13 + 17 * (k + 1)) * unit;
      const look = k ? "" : "strong ";
      sheet.text(`elbo.${name}`, table.x, base, words, { class: look });
      elbo.forEach((one, t) => {
        const attributes = { class: `${look}end number`, "data-elbo": `${name},${t + 1}` };
        sheet.text(`elbo.${name}.${t}`, end(t), base, brief(one[name]), attributes);
      });
    });
  }

  /** Draw the bound over the iterations in which it is one. */
  curve(sheet, elbo, { x, y, width, height }, unit) {
    const bounds = elbo.map(({ total, bound }, t) => ({ total, t, bound })).filter((one) => one.bound);
    const totals = bounds.map((one) => one.total);
    const [low, high] = [Math.min(...totals), Math.max(...totals)];
    const pad = 12 * unit;
    const left = x + 58 * unit;
    const at = bounds.map(({ total, t }) => [
      left + pad + (t * (x + width - left - 2 * pad)) / Math.max(elbo.length - 1, 1),
      y + pad + (height - 2 * pad - 14 * unit) * (high > low ? (high - total) / (high - low) : 0.5),
    ]);
    sheet.rect("elbo.frame", left, y, x + width - left, height - 16 * unit, { class: "cloud" });
    sheet.put("elbo.line", "path", { class: "curve", d: path(at) });
    for (const value of new Set([low, high])) {
      const base = at[totals.indexOf(value)][1] + 5 * unit;
      sheet.text(`elbo.${value === high ? "high" : "low"}`, left - 5 * unit, base, brief(value), { class: "end quiet" });
    }
    at.forEach(([px, py], k) => {
      sheet.put(`elbo.dot.${k}`, "circle", { class: "dot", cx: round(px), cy: round(py), r: 3.5 * unit });
      sheet.text(`elbo.time.${k}`, px, y + height - 3 * unit, `${bounds[k].t + 1}`, { class: "quiet middle" });
    });
  }
}

function square(x, y, side) {
  return { x: round(x), y: round(y), width: round(side), height: round(side) };
}

/** Return the middle and the half side of the square that holds a cloud in all its iterations. */
function reach({ votes, mean, spread }) {
  const points = [...votes, ...mean];
  const half = (variance) => DEVIATIONS * Math.sqrt(Math.max(variance, 0));
  const ovals = (spread ?? []).map(([[a], [, d]], t) => ({ at: mean[t], by: [half(a), half(d)] }));
  const [low, high] = [Math.min, Math.max].map((extreme, which) =>
    [0, 1].map((b) => extreme(...points.map((one) => one[b]), ...ovals.map(({ at, by }) => at[b] + (which ? by[b] : -by[b])))),
  );
  const middle = [0, 1].map((b) => (low[b] + high[b]) / 2);
  return { middle, reach: Math.max(high[0] - low[0], high[1] - low[1], 1e-9) / 2 };
}

/** Return the most active parent of a layer, as {position, type}. */
export function mostActive(activations) {
  const types = activations[0].length;
  const at = best(activations.flat());
  return { position: Math.floor(at / types), type: at % types };
}
