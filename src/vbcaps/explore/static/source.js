// Where the image comes from: thumbnails of samples, a file, or a drawing.

import { Lane, send } from "./api.js";
import { arrows, stop } from "./keys.js";

const MOST_BYTES = 8 * 2 ** 20;
const TURN = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Source {
  constructor(app) {
    this.app = app;
    this.panel = document.getElementById("image");
    this.samples = document.getElementById("samples");
    this.count = 0; // of files and drawings sent
    this.from = 0; // answers up to this one are no longer wanted
    this.tabs = [...this.panel.querySelectorAll("[data-source]")];
    for (const tab of this.tabs) tab.addEventListener("click", () => this.open(tab.dataset.source));
    arrows(this.tabs[0].parentNode, "[data-source]", true);
    arrows(this.samples, "[data-sample]");
    this.samples.addEventListener("click", (event) => {
      const thumb = event.target.closest("[data-sample]");
      if (!thumb) return;
      this.from = this.count;
      app.change({ image: { sample: Number(thumb.dataset.sample) } });
    });
    this.lane = new Lane(
      ({ path, blob }) => send(path, blob),
      (answer, { body }) => this.take(answer, body),
      (error) => this.refuse(error),
    );
    this.open("samples");
    this.listenForFiles();
    this.drawing = new Drawing((blob) => this.ask(blob));
  }

  /** Show one of the three sources. */
  open(name) {
    this.panel.dataset.shows = name;
    for (const tab of this.tabs) {
      tab.setAttribute("aria-selected", tab.dataset.source === name);
      document.getElementById(tab.dataset.source).hidden = tab.dataset.source !== name;
    }
    stop(this.tabs[0].parentNode, "[data-source]", this.tabs.find((tab) => tab.dataset.source === name));
  }

  /** Make the thumbnails of a model's samples. */
  load({ samples }) {
    const bytes = Uint8Array.from(atob(samples.sheet), (letter) => letter.charCodeAt(0));
    if (this.sheet) URL.revokeObjectURL(this.sheet);
    this.sheet = URL.createObjectURL(new Blob([bytes], { type: "image/png" }));
    const title = document.createElement("p");
    title.textContent = samples.title;
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = samples.note;
    this.samples.replaceChildren(...(samples.note ? [note] : []), title, ...samples.classes.map((one) => this.row(one, samples)));
  }

  row({ name, samples }, { columns, truths }) {
    const row = document.createElement("div");
    const label = document.createElement("span");
    label.textContent = label.title = name;
    row.append(label, ...samples.map((k) => this.thumb(k, truths[k], columns)));
    return row;
  }

  thumb(k, name, columns) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.sample = k;
    button.title = `${name}, sample ${k}`;
    button.setAttribute("aria-label", button.title);
    button.style.backgroundImage = `url(${this.sheet})`;
    button.style.backgroundSize = `${100 * columns}% auto`;
    button.style.backgroundPosition = `calc(var(--thumb) * ${-(k % columns)}) calc(var(--thumb) * ${-Math.floor(k / columns)})`;
    return button;
  }

  /** Mark the sample that is shown. */
  draw() {
    const { image } = this.app.state;
    const chosen = this.samples.querySelector(`[data-sample="${image.sample}"]`);
    for (const thumb of this.samples.querySelectorAll("[aria-pressed=true]")) thumb.setAttribute("aria-pressed", "false");
    chosen?.setAttribute("aria-pressed", "true");
    stop(this.samples, "[data-sample]", chosen);
    if (chosen && chosen !== this.chosen) this.reveal(chosen);
    this.chosen = chosen;
  }

  /** Scroll the thumbnails, and nothing else, so that one of them is seen. */
  reveal(thumb) {
    const [outer, inner] = [this.samples, thumb].map((one) => one.getBoundingClientRect());
    const names = thumb.parentNode.firstChild.offsetWidth;
    if (inner.top < outer.top || inner.bottom > outer.bottom) {
      this.samples.scrollTop += inner.top - outer.top - inner.height;
    }
    if (inner.left < outer.left + names || inner.right > outer.right) {
      this.samples.scrollLeft += inner.left - outer.left - names - inner.width;
    }
  }

  listenForFiles() {
    const input = document.querySelector("#upload input[type=file]");
    input.addEventListener("change", () => {
      if (input.files[0]) this.upload(input.files[0]);
      input.value = "";
    });
    this.panel.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.panel.classList.add("over");
    });
    this.panel.addEventListener("dragleave", () => this.panel.classList.remove("over"));
    this.panel.addEventListener("drop", (event) => {
      event.preventDefault();
      this.panel.classList.remove("over");
      this.open("upload");
      if (event.dataTransfer.files[0]) this.upload(event.dataTransfer.files[0]);
      else this.app.complain("What was dropped is not a file; drop an image file.");
    });
  }

  upload(file) {
    this.note("");
    const size = (file.size / 2 ** 20).toFixed(1);
    if (file.size <= MOST_BYTES) this.ask(file);
    else this.app.complain(`${file.name} has ${size} MB; choose an image of at most 8 MB.`);
  }

  /** Ask again for a file or drawing that was sent for a network with images of another size; say whether. */
  again() {
    const { state, model } = this.app;
    if (!("pixels" in state.image) || !this.blob || this.shape === shapeOf(model)) return false;
    this.ask(this.blob);
    return true;
  }

  ask(blob) {
    const { model } = this.app.state;
    const path = `/api/upload?model=${encodeURIComponent(model)}`;
    this.count += 1;
    this.lane.want({ key: this.count, body: { path, blob, model, count: this.count } });
  }

  take(answer, { model, count, blob }) {
    if (model !== this.app.state.model || count <= this.from) return;
    Object.assign(this, { blob, shape: shapeOf(this.app.model) });
    this.note(answer.note);
    this.app.forgive();
    this.app.change({ image: { pixels: answer.pixels } });
  }

  refuse(error) {
    this.note("");
    this.app.complain(error.message);
  }

  note(words) {
    document.getElementById("upload-note").textContent = words;
  }
}

const shapeOf = ({ side, channels }) => `${side} x ${side}, ${channels}`;

/** A canvas on which one draws white on black, with the pointer or the keys. */
class Drawing {
  constructor(changed) {
    this.changed = changed;
    this.canvas = document.querySelector("#draw canvas");
    this.pen = document.getElementById("pen");
    this.thickness = document.querySelector("#draw input[name=thickness]");
    this.ink = this.canvas.getContext("2d");
    this.at = [140, 140];
    this.clear();
    document.getElementById("clear").addEventListener("click", () => {
      this.clear();
      this.tell();
    });
    this.listen();
  }

  clear() {
    this.ink.fillStyle = "black";
    this.ink.fillRect(0, 0, 280, 280);
    this.move(this.at);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.move(this.place(event));
      this.stroke(this.at);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (canvas.hasPointerCapture(event.pointerId)) this.stroke(this.place(event));
    });
    canvas.addEventListener("keydown", (event) => {
      const turn = TURN[event.key];
      if (!turn) return;
      event.preventDefault();
      const to = this.at.map((x, k) => Math.min(Math.max(x + 8 * turn[k], 0), 280));
      if (event.shiftKey) this.stroke(to);
      else this.move(to);
    });
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [((event.clientX - box.x) / box.width) * 280, ((event.clientY - box.y) / box.height) * 280];
  }

  move(to) {
    this.at = to;
    this.pen.style.left = `${to[0] / 2.8}%`;
    this.pen.style.top = `${to[1] / 2.8}%`;
  }

  stroke(to) {
    const lineWidth = Number(this.thickness.value);
    Object.assign(this.ink, { strokeStyle: "white", lineCap: "round", lineJoin: "round", lineWidth });
    this.ink.beginPath();
    this.ink.moveTo(...this.at);
    this.ink.lineTo(...to);
    this.ink.stroke();
    this.move(to);
    this.tell();
  }

  /** Tell of the drawing once a frame, however many strokes it had. */
  tell() {
    if (this.told) return;
    this.told = true;
    requestAnimationFrame(() => {
      this.told = false;
      this.canvas.toBlob((blob) => this.changed(blob), "image/png");
    });
  }
}
