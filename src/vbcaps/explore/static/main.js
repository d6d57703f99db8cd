// The explorer: holds the state, asks the server, and tells the panels to draw.

import { AnswerPanel, best } from "./answer.js";
import { Lane, Refused, Silent, get, post } from "./api.js";
import { picture } from "./draw.js";
import { ImagePanel } from "./image.js";
import { arrows, stop } from "./keys.js";
import { DecoderPanel, PosePanel } from "./pose.js";
import { Chooser, RoutingPanel, mostActive } from "./routing.js";
import { download, toPng, toSvg } from "./save.js";
import { Source } from "./source.js";
import { fit, fromLink, layerOf, start, toLink } from "./state.js";

const SWEEP_WAITS = 250; // milliseconds
const LINK_WAITS = 120;
const RETRY_WAITS = 2000;
const by = (id) => document.getElementById(id);

const DRAWINGS = { image: ["picture"], answer: ["bars"], routing: ["map", "routes"], pose: ["curves"], decoder: ["decoded"] };

class Explorer {
  constructor(catalogue) {
    this.catalogue = catalogue;
    this.state = start(catalogue);
    this.model = null;
    this.sequence = 0; // of the state; the numbers in document.body.dataset say which state a panel shows
    this.answers = { look: null, routing: null, routed: null, sweep: null, decode: null };
    const lane = (name, show) =>
      new Lane((body) => post(`/api/${name}`, body), show.bind(this), (error, wish) => this.fail(error, wish, name));
    this.lanes = {
      look: lane("look", this.looked),
      routing: lane("routing", this.routed),
      sweep: lane("sweep", this.swept),
      decode: lane("decode", this.decoded),
    };
    this.source = new Source(this);
    this.image = new ImagePanel(this);
    this.answer = new AnswerPanel(this);
    this.chooser = new Chooser(this);
    this.routing = new RoutingPanel(this);
    this.pose = new PosePanel(this);
    this.decoder = new DecoderPanel(this);
    this.listen();
  }

  listen() {
    by("model").replaceChildren(...this.catalogue.models.map(({ name, title }) => new Option(`${name} · ${title}`, name)));
    by("model").addEventListener("change", () => this.change({ model: by("model").value }));
    by("dismiss").addEventListener("click", () => this.forgive());
    by("copy-link").addEventListener("click", () => this.copyLink());
    by("theme").addEventListener("click", () => this.change({ theme: this.theme === "dark" ? "light" : "dark" }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.dress());
    for (const tab of document.querySelectorAll("[data-view]")) {
      tab.addEventListener("click", () => this.change({ view: tab.dataset.view }));
    }
    arrows(by("views"), "[data-view]", true);
    for (const place of document.querySelectorAll(".saves")) this.offerSaves(place, place.dataset.of);
    addEventListener("hashchange", () => this.restore());
  }

  // The state and its link.

  /** Change a part of the state because the user did something. */
  change(part) {
    this.forgive();
    this.set(part);
  }

  choose(parent) {
    this.change(parent);
  }

  set(part) {
    Object.assign(this.state, part);
    this.sequence += 1;
    clearTimeout(this.linking);
    this.linking = setTimeout(() => this.writeLink(), LINK_WAITS);
    this.follow();
  }

  writeLink() {
    clearTimeout(this.linking);
    history.replaceState(null, "", toLink(this.state, this.catalogue));
  }

  /** Take the state from the link. */
  restore() {
    const { state, wrong } = fromLink(location.hash, this.catalogue);
    this.forgive();
    this.set(state);
    if (wrong.length) this.complain(wrong.join(" "));
  }

  /** Let the controls and the requests follow the state. */
  async follow() {
    this.dress();
    this.image.follow();
    this.show();
    if (this.model?.name !== this.state.model && !(await this.load())) return;
    if (this.source.again()) return; // the picture comes back in the size of this network
    this.source.draw();
    this.show();
    this.look();
  }

  /** Get the model that the state names; return whether it is the one that is still wanted. */
  async load() {
    const { model: name } = this.state;
    by("model").value = name;
    if (this.loading === name) return false;
    this.loading = name;
    this.wait(true);
    try {
      const model = await get(`/api/model?name=${encodeURIComponent(name)}`);
      if (this.state.model !== name) return false;
      this.model = model;
      this.answers = { look: null, routing: null, routed: null, sweep: null, decode: null };
      for (const lane of Object.values(this.lanes)) lane.key = null;
      for (const panel of [this.source, this.image, this.answer, this.chooser, this.routing, this.pose]) panel.load(model);
      by("about").textContent = aboutOf(model);
      document.title = `${model.name} · vbcaps explore`;
    } catch (error) {
      by("about").textContent = "";
      this.fail(error);
      return false;
    } finally {
      if (this.loading === name) {
        this.loading = null;
        this.wait(false);
      }
    }
    const wrong = fit(this.state, this.model);
    if (wrong.length) this.complain(wrong.join(" "));
    this.writeLink();
    return true;
  }

  /** Say that a network is being read; the first time that takes a moment. */
  wait(busy) {
    document.querySelector("main").setAttribute("aria-busy", busy);
    if (busy) by("about").textContent = by("status").textContent = "Loading the network …";
    else by("status").textContent = "";
  }

  // Requests: the picture first, and then what follows from it.

  get scene() {
    const { model, image, changes } = this.state;
    return { model, image, changes };
  }

  /** The parent whose routing is shown: {layer, position, type}, or null for a CNN. */
  get parent() {
    const { state, model, answers } = this;
    const layer = model && layerOf(state, model);
    if (!layer) return null;
    const ofClasses = layer.name === "class_caps";
    const middle = Math.floor((layer.rows * layer.columns) / 2);
    const type = ofClasses && answers.look ? best(answers.look.answer.probabilities) : 0;
    return { layer: layer.name, position: ofClasses ? 0 : (state.position ?? middle), type: state.type ?? type };
  }

  nameOf({ layer, position, type }) {
    if (layer === "class_caps") return this.model.classes[type];
    const { columns } = this.model.layers.find((one) => one.name === layer);
    return `type ${type + 1}, row ${Math.floor(position / columns) + 1}, column ${(position % columns) + 1}`;
  }

  look() {
    this.ask("look", this.scene, this.scene, this.sequence);
  }

  ask(name, body, key, sequence) {
    this.lanes[name].want({ key: JSON.stringify(key), body: structuredClone(body), sequence });
  }

  looked(answer, { body, sequence }) {
    if (body.model !== this.model?.name) return;
    if (answer) this.answers.look = answer;
    this.heard();
    this.image.draw();
    this.answer.draw();
    this.chooser.draw();
    this.mark("shown", sequence);
    this.afterLook(body, sequence);
  }

  afterLook(scene, sequence) {
    const { parent, state } = this;
    if (!parent) return;
    const wish = { ...scene, parent };
    this.ask("routing", wish, wish, sequence);
    clearTimeout(this.sweeping);
    if (state.view !== "pose") return;
    // The curves hold for every value of the slider that they sweep.
    const type = parent.layer === "class_caps" ? parent.type : best(this.answers.look.answer.probabilities);
    const sweep = { ...scene, sweep: state.sweep, type };
    const still = { ...sweep, changes: { ...scene.changes, [state.sweep]: null } };
    const wait = JSON.stringify(still) === this.lanes.sweep.key ? 0 : SWEEP_WAITS;
    this.sweeping = setTimeout(() => this.ask("sweep", sweep, still, sequence), wait);
    if (!this.model.vae) return;
    const decode = { ...scene, entries: state.entries, type: parent.layer === "class_caps" ? parent.type : null };
    this.ask("decode", decode, decode, sequence);
  }

  routed(answer, { body, sequence }) {
    if (body.model !== this.model?.name) return;
    if (answer) Object.assign(this.answers, { routing: answer, routed: body.parent });
    const { position, type } = this.state;
    if (body.parent.layer !== "class_caps" && body.parent.layer === this.parent.layer && position === null && type === null) {
      this.set(mostActive(this.answers.routing.activations));
      return;
    }
    this.image.draw();
    this.answer.draw();
    this.chooser.draw();
    this.routing.draw();
    this.pose.draw();
    this.mark("routed", sequence);
  }

  swept(answer, { body, sequence }) {
    if (body.model !== this.model?.name) return;
    if (answer) this.answers.sweep = { ...answer, name: body.sweep, type: body.type };
    this.answers.sweep.at = body.changes[body.sweep];
    this.pose.draw();
    this.mark("swept", sequence);
  }

  decoded(answer, { body, sequence }) {
    if (body.model !== this.model?.name) return;
    if (answer) this.answers.decode = answer;
    this.decoder.draw();
    this.mark("decoded", sequence);
  }

  /** Write the number of the state that is now on the screen, after the browser painted it. */
  async mark(name, sequence) {
    if (name === "shown") await decoded(this.answers.look.picture);
    const write = () => {
      if (sequence >= Number(document.body.dataset[name] ?? 0)) document.body.dataset[name] = sequence;
    };
    // A page in the background is not painted.
    if (document.hidden) write();
    else requestAnimationFrame(() => setTimeout(write));
  }

  // What the user is told.

  complain(words) {
    by("error").textContent = words;
    by("message").hidden = false;
  }

  forgive() {
    by("error").textContent = "";
    by("message").hidden = true;
    this.silent = false;
  }

  /** The server answered; a message that it did not is out of date. */
  heard() {
    if (this.silent) this.forgive();
  }

  fail(error, wish, lane = null) {
    if (wish && wish.body.model !== this.state.model) return;
    if (error instanceof Silent) {
      this.complain(error.message);
      this.silent = true;
      this.lanes.look.key = null;
      clearTimeout(this.retrying);
      this.retrying = setTimeout(() => this.follow(), RETRY_WAITS);
      return;
    }
    if (!(error instanceof Refused)) console.error(error);
    if (lane === "look" && "pixels" in wish.body.image && "pixels" in this.state.image) {
      this.set({ image: { sample: this.model.samples.classes[0].samples[0] } });
      this.complain(`${error.message} A sample is shown instead.`);
      return;
    }
    this.complain(error.message);
  }

  // What is around the panels.

  get theme() {
    return this.state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }

  dress() {
    document.documentElement.dataset.theme = this.theme;
    by("theme").textContent = this.theme === "dark" ? "Light" : "Dark";
    by("theme").setAttribute("aria-label", `Change to the ${by("theme").textContent.toLowerCase()} theme`);
  }

  /** Show the panel that is chosen and hide the other. */
  show() {
    const { view } = this.state;
    for (const tab of document.querySelectorAll("[data-view]")) tab.setAttribute("aria-selected", tab.dataset.view === view);
    stop(by("views"), "[data-view]", document.querySelector("[data-view][aria-selected=true]"));
    for (const name of ["routing", "pose"]) {
      by(name).hidden = name !== view;
      document.querySelector(`.saves[data-of=${name}]`).hidden = name !== view;
    }
    for (const panel of [this.answer, this.chooser, this.routing, this.pose, this.decoder]) panel.draw();
  }

  async copyLink() {
    this.writeLink();
    try {
      await navigator.clipboard.writeText(location.href);
      by("status").textContent = "The link was copied.";
      by("copy-link").textContent = "Copied";
      setTimeout(() => (by("copy-link").textContent = "Copy link"), 1500);
    } catch {
      this.complain("The browser does not let the page copy; the link is in the address bar.");
    }
  }

  offerSaves(place, panel) {
    for (const kind of ["png", "svg", "json"]) {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: kind.toUpperCase(), title: `Save as ${kind.toUpperCase()}` });
      button.setAttribute("aria-label", `Save the panel ${panel} as ${kind.toUpperCase()}`);
      button.dataset.save = `${panel},${kind}`;
      const fail = (error) => this.complain(`The panel could not be saved: ${error.message}.`);
      button.addEventListener("click", () => this.save(panel, kind).catch(fail));
      place.append(button);
    }
  }

  async save(panel, kind) {
    const name = `vbcaps-${this.state.model}-${panel}.${kind}`;
    if (kind === "json") {
      download(new Blob([JSON.stringify(this.dataOf(panel), null, 1)], { type: "application/json" }), name);
      return;
    }
    const drawings = DRAWINGS[panel].map(by);
    const { routed } = this.answers;
    const parent = routed && ["routing", "pose"].includes(panel) ? `, ${routed.layer}: ${this.nameOf(routed)}` : "";
    const drawn = toSvg(drawings, `${this.model.title}, ${this.pictureName()}${parent}`, by(`${panel}-says`), by("image"));
    download(kind === "svg" ? new Blob([drawn.text], { type: "image/svg+xml" }) : await toPng(drawn), name);
  }

  /** Name the picture that is shown, with its changes. */
  pictureName() {
    const { image, changes } = this.state;
    const named = "pixels" in image ? "own image" : `sample ${image.sample}`;
    const moved = this.catalogue.changes.filter(({ name, rest }) => changes[name] !== rest);
    return [named, ...moved.map(({ name, unit }) => `${name} ${changes[name]}${unit}`)].join(", ");
  }

  dataOf(panel) {
    const { look, routing, routed, sweep, decode } = this.answers;
    const data = {
      image: () => ({ parent: routed, field: routing?.field, ...look }),
      answer: () => look,
      routing: () => ({ parent: routed, ...routing }),
      pose: () => ({ parent: routed, pose: routing?.networks[0].pose, deviation: routing?.networks[0].deviation, sweep }),
      decoder: () => ({ entries: this.state.entries, ...decode }),
    };
    return { panel, link: location.href, scene: this.scene, data: data[panel]() };
  }
}

function aboutOf({ dataset, error, routing, iterations }) {
  const way = routing ? `, ${iterations} iterations` : "";
  return `${dataset}${error === null ? "" : `, test error ${(100 * error).toFixed(2)}%`}${way}`;
}

/** Wait until the browser can paint a picture. */
function decoded(base64) {
  const image = new Image();
  image.src = picture(base64);
  return image.decode().catch(() => null);
}

async function begin() {
  by("message").hidden = true;
  try {
    const explorer = new Explorer(await get("/api/catalogue"));
    window.explorer = explorer;
    explorer.restore();
  } catch (error) {
    by("error").textContent = error.message;
    by("message").hidden = false;
    if (error instanceof Silent) setTimeout(begin, RETRY_WAITS);
  }
}

begin();
