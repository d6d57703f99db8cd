// The answer panel: probabilities, how familiar the image is, the scores, and what other networks say.

import {
  Sheet, brief, cut, heatMap, number, path, percent, picture, roomIn, round, unitOf, widthOf, wrap,
} from "./draw.js";
import { arrows, stop } from "./keys.js";

const ROUTINGS = { vb: "VB", em: "EM", dynamic: "Dynamic" };
const LARGE = 1.45; // how much larger the letters of the answer are than others
const STRANGE = 0.95; // the share of familiar images beyond which the gauge is orange

export const routingOf = (routing) => ROUTINGS[routing] ?? "CNN";

/** Return the index of the largest number. */
export const best = (numbers) => numbers.indexOf(Math.max(...numbers));

/** Return the indices of the largest numbers, the largest first. */
export const highest = (numbers, count) =>
  [...numbers.keys()].sort((a, b) => numbers[b] - numbers[a]).slice(0, count);

export class AnswerPanel {
  constructor(app) {
    this.app = app;
    this.panel = document.getElementById("answer");
    this.svg = document.getElementById("bars");
    this.sheet = new Sheet(this.svg);
    this.svg.addEventListener("click", (event) => {
      const bar = event.target.closest("[data-class]");
      if (bar) app.choose({ layer: null, position: null, type: Number(bar.dataset.class) });
    });
    arrows(this.svg, "[data-class]");
    new ResizeObserver(() => this.draw()).observe(this.panel);
  }

  /** Say in one sentence what the panel shows of this model. */
  load({ routing, objects }) {
    const says = {
      vb:
        "Each bar is the probability of a class, softmax(<i>z</i> / <i>T</i>), its whisker the 90% interval under <i>q</i>(<i>π</i>) <i>q</i>(" +
        "<i>Λ<sub>j</sub></i>), and the ring the activation <i>a<sub>j</sub></i> of the class capsule.",
      none: "Each bar is the probability that this CNN gives a class; without a posterior it has no interval.",
    };
    says.em = says.dynamic =
      "Each bar is the probability of a class, and the ring the activation <i>a<sub>j</sub></i> of its capsule; " +
      `${routingOf(routing)} routing has no posterior and so no interval.`;
    const several =
      `Each bar is the probability that a class is in the image, of which the ${objects} highest are the answer` +
      (routing ? ", and the ring the activation <i>a<sub>j</sub></i> of its capsule." : ".");
    document.getElementById("answer-says").innerHTML = objects > 1 ? several : says[routing ?? "none"];
  }

  draw() {
    const { answers, model } = this.app;
    if (!answers.look || !model) return;
    const width = roomIn(this.panel);
    const unit = unitOf(this.svg);
    const several = model.objects > 1;
    const parts = [this.headline, this.bars, several ? this.taken : this.gauge, this.twins, this.scores];
    // The height is known once all is drawn; the first drawing of a size is made twice.
    let height = this.height ?? 100;
    const paint = (sheet) => {
      height = parts.reduce((y, part) => part.call(this, sheet, y, width, unit, answers.look), 0);
    };
    this.sheet.draw(width, height, paint);
    if (height !== this.height) this.sheet.draw(width, height, paint);
    this.height = height;
    const chosen = this.svg.querySelector('[data-class][aria-pressed="true"]');
    if (!this.svg.contains(document.activeElement)) stop(this.svg, "[data-class]", chosen);
  }

  headline(sheet, y, width, unit, { answer }) {
    const { classes, objects, samples } = this.app.model;
    const tops = highest(answer.probabilities, objects);
    const base = y + 20 * unit;
    const names = tops.map((j) => classes[j]).join(" + ");
    const { sample } = this.app.state.image;
    if (objects === 1) {
      sheet.text("top", 0, base, names, { class: "large" });
      sheet.text("top.p", width, base, percent(answer.probabilities[tops[0]]), { class: "large end" });
      return y + 30 * unit;
    }
    sheet.text("top", 0, base, cut(names, width / LARGE, this.svg, true), { class: "large" });
    if (sample === undefined) return y + 30 * unit;
    sheet.text("truth", 0, base + 18 * unit, `In the image: ${samples.truths[sample]}`, { class: "quiet", id: "truth" });
    return y + 48 * unit;
  }

  /** Draw for each object that is named the parts of the image that its class capsule took; a click chooses it. */
  taken(sheet, y, width, unit, look) {
    if (!look.taken) return y;
    const { classes } = this.app.model;
    const { objects, frame } = look.taken;
    const next = this.heading(sheet, "taken.head", "What each object took", y, width, unit);
    const gap = 8 * unit;
    const side = Math.min((width - gap * (objects.length - 1)) / objects.length, 130 * unit);
    objects.forEach(({ type, parts }, k) => {
      const x = k * (side + gap);
      const name = `taken.${k}`;
      const group = sheet.put(name, "g", {
        class: "taken",
        role: "button",
        "data-class": type,
        "data-taken": JSON.stringify(parts),
        "aria-label": `${classes[type]}: what it took`,
      });
      const box = { x: round(x), y: round(next + 20 * unit), width: round(side), height: round(side) };
      sheet.text(`${name}.name`, x, next + 14 * unit, cut(classes[type], side, this.svg), { class: "strong" }, group);
      const view = { viewBox: `0 0 ${look.width} ${look.height}`, preserveAspectRatio: "none" };
      const inner = sheet.put(`${name}.crop`, "svg", { ...box, ...view }, null, group);
      const all = { href: picture(look.picture), width: look.width, height: look.height, preserveAspectRatio: "none" };
      sheet.rect(`${name}.black`, 0, 0, look.width, look.height, { fill: "#000" }, inner);
      sheet.put(`${name}.picture`, "image", { class: "pixels dim", ...all }, null, inner);
      const size = [frame.right - frame.left, frame.bottom - frame.top];
      heatMap(sheet, `${name}.cell`, parts, frame.left, frame.top, ...size, Math.max(...parts.flat()), inner);
    });
    return next + 20 * unit + side + 8 * unit;
  }

  bars(sheet, y, width, unit, { answer }) {
    const { model } = this.app;
    const step = 20 * unit;
    const names = Math.min(Math.max(...model.classes.map((name) => widthOf(name, this.svg, true))) + 10, width * 0.38);
    const [x, end] = [names, width - 66 * unit];
    const at = (p) => x + p * (end - x);
    const bottom = y + step * model.classes.length;
    for (const p of [0, 0.5, 1]) sheet.line(`grid.${p}`, at(p), y, at(p), bottom, { class: p ? "grid" : "axis" });
    const { parent } = this.app;
    const chosen = parent?.layer === "class_caps" ? parent.type : null;
    const tops = highest(answer.probabilities, model.objects);
    model.classes.forEach((name, j) => {
      const p = answer.probabilities[j];
      const middle = y + (j + 0.5) * step;
      const group = sheet.put(`class.${j}`, "g", {
        class: `class${j === chosen ? " chosen" : ""}${tops.includes(j) ? " top" : ""}`,
        role: "button",
        "data-class": j,
        "data-probability": p,
        "aria-pressed": j === chosen,
        "aria-label": this.spoken(j, name, answer),
      });
      sheet.rect(`hit.${j}`, 0, y + j * step, width, step, { class: "hit" }, group);
      sheet.text(`name.${j}`, 2, middle + 4.5 * unit, cut(name, names - 6, this.svg, true), {}, group);
      sheet.rect(`bar.${j}`, x, middle - 6 * unit, at(p) - x, 12 * unit, { class: "bar" }, group);
      if (answer.low) this.whisker(sheet, j, at(answer.low[j]), at(answer.high[j]), middle, unit, group);
      const ring = { class: "ring", cx: round(at(answer.activations[j])), cy: round(middle), r: round(3.4 * unit) };
      if (model.routing) sheet.put(`ring.${j}`, "circle", ring, null, group);
      sheet.text(`p.${j}`, width - 2, middle + 4.5 * unit, percent(p), { class: "end number" }, group);
    });
    return bottom + 6 * unit;
  }

  whisker(sheet, j, low, high, middle, unit, group) {
    const tick = 3.5 * unit;
    const end = (x) => path([[x, middle - tick], [x, middle + tick]]);
    const d = path([[low, middle], [high, middle]]) + end(low) + end(high);
    sheet.put(`whisker.${j}`, "path", { class: "whisker", d }, null, group);
  }

  spoken(j, name, { probabilities, low, high, activations }) {
    const interval = low ? `, 90% interval ${percent(low[j])} to ${percent(high[j])}` : "";
    return `${name}: probability ${percent(probabilities[j])}${interval}, activation ${number(activations[j])}`;
  }

  gauge(sheet, y, width, unit, { gauge }) {
    let next = this.heading(sheet, "gauge.head", "Familiarity", y, width, unit);
    if (!gauge) {
      const none = "This network has no reference for what is familiar, so there is no gauge.";
      return this.lines(sheet, "gauge.none", none, next, width, unit);
    }
    const { percentile } = gauge;
    const strange = percentile >= STRANGE;
    const group = sheet.put("gauge", "g", { id: "gauge", "data-percentile": percentile, class: strange ? "strange" : "" });
    const put = (...rest) => sheet.text(...rest, group);
    put("gauge.left", 0, next + 12 * unit, "familiar", { class: "quiet" });
    put("gauge.right", width, next + 12 * unit, "strange", { class: "quiet end" });
    const x = percentile * width;
    put("gauge.value", width, y + 20 * unit, percent(percentile, percentile > 0.99 ? 1 : 0), { class: "end strong" });
    const track = next + 19 * unit;
    sheet.rect("gauge.track", 0, track, width, 6 * unit, { class: "track" }, group);
    sheet.rect("gauge.fill", 0, track, x, 6 * unit, { class: "level" }, group);
    for (const p of [0.05, 0.5, STRANGE]) {
      sheet.line(`gauge.${p}`, p * width, track, p * width, track + 6 * unit, { class: "notch" }, group);
    }
    const at = Math.min(Math.max(x, 1), width - 1);
    sheet.line("gauge.needle", at, track - 4 * unit, at, track + 10 * unit, { class: "needle" }, group);
    return this.lines(sheet, "gauge.says", gauge.sentence, track + 12 * unit, width, unit);
  }

  twins(sheet, y, width, unit, { answer, twins }) {
    if (!twins.length) return y;
    const { classes, objects } = this.app.model;
    let next = this.heading(sheet, "twins.head", "Other networks on this image", y, width, unit);
    const mine = highest(answer.probabilities, objects);
    for (const { name, routing, probabilities } of twins) {
      const theirs = highest(probabilities, objects);
      const base = next + 14 * unit;
      const differs = theirs.some((j) => !mine.includes(j));
      const said = { class: differs ? "differs" : "", "data-twin": name, "data-top": theirs.join(",") };
      const group = sheet.put(`twin.${name}`, "g", said);
      const names = theirs.map((j) => classes[j]).join(" + ");
      sheet.put(`twin.${name}.title`, "title", {}, name, group);
      sheet.text(`twin.${name}.routing`, 2, base, routingOf(routing), { class: "quiet" }, group);
      sheet.text(`twin.${name}.class`, 68 * unit, base, cut(names, width - 170 * unit, this.svg), {}, group);
      sheet.text(`twin.${name}.mark`, width - 54 * unit, base, differs ? "differs" : "", { class: "end mark" }, group);
      sheet.text(`twin.${name}.p`, width - 2, base, percent(probabilities[theirs.at(-1)]), { class: "end number" }, group);
      next += 19 * unit;
    }
    return next + 4 * unit;
  }

  scores(sheet, y, width, unit, { scores }) {
    if (!scores.length) return y;
    let next = this.heading(sheet, "scores.head", "Scores: larger is stranger", y, width, unit);
    sheet.text("scores.rank", width - 2, y + 20 * unit, "stranger than", { class: "end quiet small" });
    const [symbol, value] = [width * 0.44, width - 45 * unit];
    for (const one of scores) {
      const base = next + 14 * unit;
      const group = sheet.put(`score.${one.name}`, "g", { class: "small", "data-score": one.name });
      sheet.put(`score.${one.name}.about`, "title", {}, `${one.title}, ${one.symbol}`, group);
      sheet.text(`score.${one.name}.title`, 2, base, cut(one.title, symbol - 8, group), { class: "small" }, group);
      const said = cut(one.symbol, value - symbol - 44 * unit, group);
      sheet.text(`score.${one.name}.symbol`, symbol, base, said, { class: "symbol" }, group);
      sheet.text(`score.${one.name}.value`, value, base, brief(one.value), { class: "end number small" }, group);
      const rank = one.percentile === null ? "–" : percent(one.percentile, 0);
      sheet.text(`score.${one.name}.rank`, width - 2, base, rank, { class: "end number quiet" }, group);
      next += 17 * unit;
    }
    return next + 2 * unit;
  }

  heading(sheet, name, words, y, width, unit) {
    sheet.line(`${name}.line`, 0, y + 4 * unit, width, y + 4 * unit, { class: "grid" });
    sheet.text(name, 0, y + 20 * unit, words, { class: "heading" });
    return y + 26 * unit;
  }

  lines(sheet, name, words, y, width, unit) {
    const broken = wrap(words, width, this.svg);
    broken.forEach((line, k) => sheet.text(`${name}.${k}`, 0, y + (15 + 16 * k) * unit, line, { class: "quiet" }));
    return y + (16 * broken.length + 8) * unit;
  }
}
