// What the user chose, and the link that restores it.

const ENTRIES = 16;
const VIEWS = ["routing", "pose"];
const THEMES = ["light", "dark"];

/** Return the state that the page begins with. */
export function start(catalogue) {
  return {
    model: catalogue.model,
    image: { sample: 0 },
    changes: rest(catalogue),
    view: "routing",
    layer: null, // null: the class capsules
    position: null, // null, and so for the type: the class of the answer, or the most active capsule
    type: null,
    sweep: catalogue.sweeps[0],
    entries: Array(ENTRIES).fill(0),
    heat: false,
    theme: null, // null: the theme of the system
  };
}

/** Return all changes at rest. */
export function rest(catalogue) {
  return Object.fromEntries(catalogue.changes.map(({ name, rest }) => [name, rest]));
}

/** Write a state as the readable end of a link; what is as it began is left out. */
export function toLink(state, catalogue) {
  const said = [["model", state.model]];
  if ("pixels" in state.image) said.push(["pixels", toUrl(state.image.pixels)]);
  else said.push(["sample", state.image.sample]);
  for (const { name, rest } of catalogue.changes) if (state.changes[name] !== rest) said.push([name, state.changes[name]]);
  if (state.view !== "routing") said.push(["view", state.view]);
  for (const name of ["layer", "position", "type"]) if (state[name] !== null) said.push([name, state[name]]);
  if (state.sweep !== catalogue.sweeps[0]) said.push(["sweep", state.sweep]);
  const moved = state.entries.map((value, d) => `${d}:${value}`).filter((_, d) => state.entries[d] !== 0);
  if (moved.length) said.push(["vae", moved.join(",")]);
  if (state.heat) said.push(["heat", 1]);
  if (state.theme) said.push(["theme", state.theme]);
  const readable = (value) => encodeURIComponent(value).replaceAll("%3A", ":").replaceAll("%2C", ",");
  return `#${said.map(([name, value]) => `${name}=${readable(value)}`).join("&")}`;
}

/** Read the end of a link; return the state and a sentence for each part of it that cannot be used. */
export function fromLink(hash, catalogue) {
  const state = start(catalogue);
  const wrong = [];
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, "").replaceAll("+", "%2B"))) {
    const own = (one) => Object.hasOwn(one, name);
    const set = own(READERS) ? READERS[name] : own(state.changes) ? readChange(name) : null;
    if (!set) wrong.push(`The link says “${name}”, which this page does not know.`);
    else if (!set(state, value, catalogue)) wrong.push(`The link says ${name}=${value.slice(0, 40)}, which cannot be used.`);
  }
  return { state, wrong };
}

// Each reader sets a part of the state and returns whether the value could be used.
const READERS = {
  model: (state, value, { models }) => pick(state, "model", value, models.map((one) => one.name)),
  sample: (state, value) => whole(value) !== null && Boolean((state.image = { sample: whole(value) })),
  pixels: (state, value) => /^[\w-]+$/.test(value) && Boolean((state.image = { pixels: fromUrl(value) })),
  view: (state, value) => pick(state, "view", value, VIEWS),
  layer: (state, value) => Boolean(value) && Boolean((state.layer = value)),
  position: (state, value) => (state.position = whole(value)) !== null,
  type: (state, value) => (state.type = whole(value)) !== null,
  sweep: (state, value, { sweeps }) => pick(state, "sweep", value, sweeps),
  vae: readEntries,
  heat: (state, value) => (state.heat = value === "1") || value === "0",
  theme: (state, value) => pick(state, "theme", value, THEMES),
};

function pick(state, name, value, values) {
  if (!values.includes(value)) return false;
  state[name] = value;
  return true;
}

function whole(value) {
  return /^\d{1,6}$/.test(value) ? Number(value) : null;
}

function readChange(name) {
  return (state, value, { changes }) => {
    const { least, most } = changes.find((one) => one.name === name);
    const number = value.trim() ? Number(value) : NaN;
    if (!(number >= least && number <= most)) return false;
    state.changes[name] = number;
    return true;
  };
}

function readEntries(state, value) {
  const read = value.split(",").map((part) => part.split(":").map(Number));
  const right = ([d, moved]) => Number.isInteger(d) && d >= 0 && d < ENTRIES && Math.abs(moved) < 1000;
  if (!read.every((part) => part.length === 2 && right(part))) return false;
  for (const [d, moved] of read) state.entries[d] = moved;
  return true;
}

const toUrl = (base64) => base64.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");

function fromUrl(text) {
  const base64 = text.replaceAll("-", "+").replaceAll("_", "/");
  return base64.padEnd(Math.ceil(base64.length / 4) * 4, "=");
}

/** Bring a state into what a model has; return a sentence for each part that had to go. */
export function fit(state, model) {
  const wrong = [];
  const samples = model.samples.classes.flatMap((one) => one.samples);
  if ("sample" in state.image && !samples.includes(state.image.sample)) {
    if (state.image.sample !== 0) wrong.push(`There is no sample ${state.image.sample} of ${model.dataset}; another is shown.`);
    state.image = { sample: Math.min(...samples) };
  }
  const layer = layerOf(state, model);
  if (state.layer !== null && state.layer !== layer?.name) {
    wrong.push(`${model.title} has no layer ${state.layer}; the class capsules are shown.`);
    Object.assign(state, { layer: null, position: null, type: null });
  } else if (layer && (state.position >= layer.rows * layer.columns || state.type >= layer.types)) {
    wrong.push(`${model.title} has no such parent in ${layer.name}; another is shown.`);
    Object.assign(state, { position: null, type: null });
  }
  return wrong;
}

/** Return the layer that a state chooses; without a choice the class capsules, and null for a CNN. */
export function layerOf(state, model) {
  return model.layers.find((one) => one.name === state.layer) ?? (state.layer === null ? model.layers.at(-1) : null) ?? null;
}
