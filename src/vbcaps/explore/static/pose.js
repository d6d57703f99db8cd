// The pose panel: the matrix of the parent, how its entries move with the image, and the Capsule-VAE's sliders.

import { Sheet, number, path, picture, roomIn, round, unitOf } from "./draw.js";
import { arrows, stop } from "./keys.js";

/** Return the row and the column of an entry of the pose, from 11 to 44. */
const entry = (d, side) => `${Math.floor(d / side) + 1}${(d % side) + 1}`;

export class PosePanel {
  constructor(app) {
    this.app = app;
    this.panel = document.getElementById("pose");
    this.svg = document.getElementById("curves");
    this.sheet = new Sheet(this.svg);
    this.sweeps = document.getElementById("sweeps");
    this.sweeps.replaceChildren(...app.catalogue.sweeps.map((name) => this.button(name)));
    this.sweeps.addEventListener("click", (event) => {
      const button = event.target.closest("[data-sweep]");
      if (button) app.change({ sweep: button.dataset.sweep });
    });
    arrows(this.sweeps, "[data-sweep]");
    new ResizeObserver(() => this.draw()).observe(this.panel);
  }

  button(name) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: this.titleOf(name) });
    button.dataset.sweep = name;
    return button;
  }

  titleOf(name) {
    return this.app.catalogue.changes.find((one) => one.name === name).title;
  }

  load({ routing }) {
    const deviations = {
      vb: " ± <i>σ<sub>j</sub></i> under <i>q</i>(<i>μ<sub>j</sub></i>, <i>Λ<sub>j</sub></i>)",
      em: " ± EM's <i>σ<sub>j</sub></i>",
    };
    const deviation = deviations[routing] ?? "";
    const band = deviation ? ", with a band of ± <i>σ<sub>j</sub></i>" : "";
    document.getElementById("pose-says").innerHTML = routing
      ? `The matrix is the parent's pose <i>m<sub>j</sub></i>${deviation}, and each curve an entry of the class's pose ` +
        `while the image is moved${band}.`
      : "A CNN has no poses; choose a network with capsules to see them.";
  }

  draw() {
    const { state, answers } = this.app;
    for (const button of this.sweeps.children) button.setAttribute("aria-pressed", button.dataset.sweep === state.sweep);
    stop(this.sweeps, "[data-sweep]", this.sweeps.querySelector("[aria-pressed=true]"));
    const { routing, sweep } = answers;
    this.sweeps.hidden = !this.app.model?.layers.length;
    this.svg.toggleAttribute("hidden", !routing);
    const width = roomIn(this.panel);
    if (!routing || width <= 0) return;
    const unit = unitOf(this.svg);
    const matrix = Math.min(width * 0.335, 330 * unit);
    const top = 22 * unit;
    const height = top + matrix + 96 * unit;
    this.sheet.draw(width, round(height), (sheet) => {
      this.matrix(sheet, routing.networks[0], matrix, top, unit);
      if (!sweep) return;
      const left = matrix + 48 * unit;
      this.curves(sheet, sweep, { x: left, y: top, width: width - left - 4, height: height - top - 34 * unit }, unit);
      const strip = { x: 36 * unit, y: top + matrix + 24 * unit, width: matrix - 36 * unit, height: 38 * unit };
      this.probability(sheet, sweep, strip, unit);
    });
  }

  /** Draw the mean and the deviation of each entry, red where positive and blue where negative. */
  matrix(sheet, { pose, deviation }, size, top, unit) {
    const side = Math.round(Math.sqrt(pose.length));
    const cell = size / side;
    const most = Math.max(...pose.map(Math.abs), 1e-9);
    const decimals = most < 0.1 && cell > 60 * unit ? 3 : 2;
    const { routed } = this.app.answers;
    const of = routed.layer === "class_caps" ? ` of ${this.app.nameOf(routed)}` : "";
    sheet.text("matrix.title", 0, 13 * unit, `Pose *m*_{j}${deviation ? " ± *σ*_{j}" : ""}${of}`, { class: "heading" });
    pose.forEach((value, d) => {
      const [x, y] = [(d % side) * cell, top + Math.floor(d / side) * cell];
      const look = { class: value < 0 ? "entry below" : "entry above", "fill-opacity": round((0.62 * Math.abs(value)) / most) };
      sheet.rect(`entry.${d}`, x + 1, y + 1, cell - 2, cell - 2, { ...look, "data-entry": d, "data-value": value });
      const middle = y + cell / 2 + (deviation ? -2 : 5) * unit;
      sheet.text(`entry.${d}.mean`, x + cell / 2, middle, number(value, decimals), { class: "middle number strong" });
      if (!deviation) return;
      const words = `±${number(deviation[d], decimals)}`;
      sheet.text(`entry.${d}.deviation`, x + cell / 2, middle + 16 * unit, words, { class: "middle number quiet" });
    });
  }

  /** Draw a small curve for each entry, all on one scale. */
  curves(sheet, sweep, { x, y, width, height }, unit) {
    const { values, poses, deviations } = sweep;
    const count = poses[0].length;
    const side = Math.round(Math.sqrt(count));
    const gap = 5 * unit;
    const [w, h] = [(width + gap) / side - gap, (height + gap) / side - gap];
    const wide = (k, d) => deviations?.[k][d] ?? 0;
    const bands = poses.map((pose, k) => pose.map((value, d) => [value - wide(k, d), value + wide(k, d)]));
    const most = Math.max(...bands.flat(2).map(Math.abs), 1e-9);
    const name = this.app.model.classes[sweep.type];
    sheet.text("curves.title", x, 13 * unit, `Entries of *m*_{j} of ${name}`, { class: "heading" });
    for (let d = 0; d < count; d += 1) {
      const [left, top] = [x + (d % side) * (w + gap), y + Math.floor(d / side) * (h + gap)];
      const place = axis(values, [-most, most], left, top, w, h);
      sheet.rect(`curve.${d}.frame`, left, top, w, h, { class: "cloud" });
      sheet.line(`curve.${d}.zero`, left, place.y(0), left + w, place.y(0), { class: "grid" });
      if (deviations) {
        const upper = values.map((v, k) => [place.x(v), place.y(bands[k][d][1])]);
        const lower = values.map((v, k) => [place.x(v), place.y(bands[k][d][0])]).reverse();
        sheet.put(`curve.${d}.band`, "path", { class: "band", d: `${path([...upper, ...lower])}Z` });
      }
      const points = values.map((v, k) => [place.x(v), place.y(poses[k][d])]);
      sheet.put(`curve.${d}`, "path", { class: "curve", "data-curve": d, d: path(points) });
      this.present(sheet, `curve.${d}.present`, sweep, place, top, h);
      sheet.text(`curve.${d}.name`, left + 4 * unit, top + 13 * unit, `*m*_{${entry(d, side)}}`, { class: "quiet" });
      if (d === 0) this.range(sheet, `curve.${d}`, number(most, 1), number(-most, 1), left, top, h, unit);
    }
    this.ticks(sheet, "curves", sweep, x, y + height, w, unit);
    const axisName = `${this.titleOf(sweep.name)} in ${sweep.unit}, all on one scale`;
    sheet.text("curves.unit", x + width, y + height + 29 * unit, axisName, { class: "end quiet" });
  }

  probability(sheet, sweep, { x, y, width, height }, unit) {
    const { values, probabilities, type } = sweep;
    const place = axis(values, [0, 1], x, y, width, height);
    sheet.text("p.title", x, y - 6 * unit, `Probability of ${this.app.model.classes[type]}`, { class: "quiet" });
    sheet.rect("p.frame", x, y, width, height, { class: "cloud" });
    sheet.put("p.curve", "path", { class: "curve", d: path(values.map((v, k) => [place.x(v), place.y(probabilities[k])])) });
    this.present(sheet, "p.present", sweep, place, y, height);
    this.range(sheet, "p", "1", "0", x, y, height, unit);
    this.ticks(sheet, "p", sweep, x, y + height, width, unit);
  }

  /** Mark the present value of the slider, where the curves reach it. */
  present(sheet, name, { values, at }, place, top, height) {
    if (at < values[0] || at > values.at(-1)) return;
    sheet.line(name, place.x(at), top, place.x(at), top + height, { class: "present" });
  }

  range(sheet, name, high, low, left, top, height, unit) {
    sheet.text(`${name}.high`, left - 4 * unit, top + 11 * unit, high, { class: "end quiet number" });
    sheet.text(`${name}.low`, left - 4 * unit, top + height - 1, low, { class: "end quiet number" });
  }

  ticks(sheet, name, { values, unit: of }, left, bottom, width, unit) {
    const say = (value) => `${number(value, 0)}${of === "°" ? of : ""}`;
    sheet.text(`${name}.first`, left, bottom + 14 * unit, say(values[0]), { class: "quiet number" });
    sheet.text(`${name}.last`, left + width, bottom + 14 * unit, say(values.at(-1)), { class: "end quiet number" });
  }
}

/** Return the functions that place a value across and down a box. */
function axis(values, [low, high], left, top, width, height) {
  const [first, last] = [values[0], values.at(-1)];
  return {
    x: (value) => left + ((value - first) / (last - first || 1)) * width,
    y: (value) => top + ((high - value) / (high - low)) * height,
  };
}

const RANGE = 3; // deviations that a slider of the decoder reaches

/** The Capsule-VAE: a slider for each entry of the pose, and the picture that is decoded from it. */
export class DecoderPanel {
  constructor(app) {
    this.app = app;
    this.panel = document.getElementById("decoder");
    this.svg = document.getElementById("decoded");
    this.sheet = new Sheet(this.svg);
    this.sliders = app.state.entries.map((_, d) => this.slider(d));
    document.getElementById("entries").replaceChildren(...this.sliders.map((one) => one.row));
    document.getElementById("entries-rest").addEventListener("click", () => {
      app.change({ entries: app.state.entries.map(() => 0) });
    });
    new ResizeObserver(() => this.draw()).observe(this.panel);
  }

  slider(d) {
    const row = document.createElement("label");
    const name = document.createElement("span");
    const input = document.createElement("input");
    const shown = document.createElement("output");
    const index = entry(d, 4);
    name.innerHTML = `<i>m</i><sub>${index}</sub>`;
    Object.assign(input, { type: "range", name: `entry${d}`, min: -1, max: 1, step: "any", value: 0 });
    input.setAttribute("aria-label", `Entry ${index} of the pose`);
    const set = (value) => this.app.change({ entries: this.app.state.entries.map((old, e) => (e === d ? value : old)) });
    input.addEventListener("input", () => set(Number(Number(input.value).toFixed(3))));
    input.addEventListener("keydown", (event) => this.step(event, input, set));
    input.addEventListener("dblclick", () => set(0));
    row.append(name, input, shown);
    return { row, input, shown };
  }

  /** Move a slider by a thirtieth of its range with the arrow keys. */
  step(event, input, set) {
    const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const most = Number(input.max);
    const to = Number(input.value) + (way * most) / 15;
    set(Number(Math.min(Math.max(to, -most), most).toFixed(3)));
  }

  draw() {
    const { app } = this;
    const { decode } = app.answers;
    this.panel.hidden = !app.model?.vae || !app.model.layers.length;
    if (this.panel.hidden || !decode) return;
    this.sliders.forEach(({ input, shown }, d) => {
      const most = RANGE * decode.deviation[d];
      Object.assign(input, { min: -most, max: most });
      if (Number(input.value) !== app.state.entries[d]) input.value = app.state.entries[d];
      shown.value = number(decode.mean[d] + app.state.entries[d]);
      input.setAttribute("aria-valuetext", shown.value);
    });
    document.getElementById("decoder-says").innerHTML =
      "The Capsule-VAE <b></b> draws the picture on the right from the pose <i>m<sub>j</sub></i> of its class <b></b>, and " +
      "each slider moves an entry of it.";
    const [vae, name] = document.querySelectorAll("#decoder-says b");
    vae.textContent = decode.vae;
    name.textContent = app.model.classes[decode.class];
    const unit = unitOf(this.svg);
    const size = 98 * unit;
    this.sheet.draw(round(2 * size + 8 * unit), round(size + 20 * unit), (sheet) => {
      const place = { class: "pixels", y: round(18 * unit), width: size, height: size };
      const put = (key, base64, x) => sheet.put(key, "image", { ...place, href: picture(base64), x: round(x) });
      sheet.text("original.title", 0, 12 * unit, "original", { class: "quiet" });
      sheet.text("decoded.title", size + 8 * unit, 12 * unit, "decoded", { class: "quiet" });
      put("original", decode.original, 0);
      put("decoded", decode.picture, size + 8 * unit);
    });
  }
}
