// The image panel: what the network sees, and the sliders that change it.

import { Sheet, heatMap, number, percent, picture, roomIn } from "./draw.js";
import { rest } from "./state.js";

export class ImagePanel {
  constructor(app) {
    this.app = app;
    this.sheet = new Sheet(document.getElementById("picture"));
    this.box = document.querySelector("#image .picture");
    this.heat = document.getElementById("heat");
    this.heat.addEventListener("change", () => app.change({ heat: this.heat.checked }));
    this.sliders = app.catalogue.changes.map((one) => this.slider(one));
    document.getElementById("rest").addEventListener("click", () => app.change({ changes: rest(app.catalogue) }));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  slider({ name, title, unit, least, most, step, rest }) {
    const row = document.createElement("div");
    const label = document.createElement("label");
    const input = document.createElement("input");
    const shown = document.createElement("output");
    const back = document.createElement("button");
    label.textContent = title;
    label.htmlFor = shown.htmlFor = input.id = `change-${name}`;
    Object.assign(input, { type: "range", name, min: least, max: most, step });
    Object.assign(back, { type: "button", textContent: "↺", title: `Reset ${title.toLowerCase()}` });
    back.setAttribute("aria-label", back.title);
    const set = (value) => this.app.change({ changes: { ...this.app.state.changes, [name]: value } });
    input.addEventListener("input", () => set(Number(input.value)));
    input.addEventListener("dblclick", () => set(rest));
    back.addEventListener("click", () => set(rest));
    row.append(label, input, shown, back);
    document.getElementById("changes").append(row);
    const decimals = (String(step).split(".")[1] ?? "").length;
    const space = ["°", "%"].includes(unit) ? "" : " ";
    const say = (value) => (unit === "share" ? percent(value, 0) : `${number(value, decimals)}${space}${unit}`.trim());
    return { name, input, shown, back, rest, say };
  }

  /** Say in one sentence what the panel shows of this model. */
  load({ routing }) {
    document.getElementById("image-says").innerHTML = routing
      ? "The network sees this picture; the frame is the receptive field of the chosen parent, from which its votes " +
        "<i>V<sub>j|i</sub></i> come."
      : "The network sees this picture, cut, sized and changed by the sliders.";
  }

  /** Put the sliders where the state says. */
  follow() {
    const { state } = this.app;
    this.heat.checked = state.heat;
    for (const { name, input, shown, back, rest, say } of this.sliders) {
      const value = state.changes[name];
      if (Number(input.value) !== value) input.value = value;
      shown.value = say(value);
      input.setAttribute("aria-valuetext", say(value));
      back.disabled = value === rest;
    }
  }

  draw() {
    const { look, routing } = this.app.answers;
    if (!look) return;
    const { width, height, cameras } = look;
    document.getElementById("image").dataset.cameras = cameras;
    const scale = Math.min(roomIn(this.box) / width, this.box.clientHeight / height);
    const [w, h] = [Math.floor(width * scale), Math.floor(height * scale)];
    const one = w / cameras;
    this.sheet.draw(w, h, (sheet) => {
      const shape = { href: picture(look.picture), width: w, height: h, preserveAspectRatio: "none" };
      sheet.put("picture", "image", { class: "pixels", ...shape });
      if (!routing) return;
      for (let camera = 0; camera < cameras; camera += 1) {
        if (this.app.state.heat) this.parts(sheet, camera, routing, one / (width / cameras), h / height, one);
        this.outline(sheet, camera, routing.field, one / (width / cameras), h / height, one);
      }
    });
  }

  /** Draw the parts that the parent took in the last iteration, where their capsules see the picture. */
  parts(sheet, camera, { networks, frame }, across, down, one) {
    const parts = networks[0].parts.at(-1);
    const corner = [camera * one + frame.left * across, frame.top * down];
    const size = [(frame.right - frame.left) * across, (frame.bottom - frame.top) * down];
    heatMap(sheet, `heat.${camera}`, parts, ...corner, ...size, Math.max(...parts.flat()));
  }

  /** Outline the receptive field; a white line below it keeps it visible on any picture. */
  outline(sheet, camera, { top, left, bottom, right }, across, down, one) {
    const x = camera * one + left * across + 1.5;
    const box = [x, top * down + 1.5, (right - left) * across - 3, (bottom - top) * down - 3];
    sheet.rect(`field.${camera}.below`, ...box, { class: "field below" });
    sheet.rect(`field.${camera}`, ...box, { class: "field" });
  }
}
