// Drawing in SVG: a sheet that keeps its nodes from one picture to the next, colours, numbers and shapes.

const NS = "http://www.w3.org/2000/svg";

/** An SVG whose nodes have names: what is drawn again under the same name is moved, not made anew. */
export class Sheet {
  constructor(svg) {
    this.svg = svg;
    this.kept = new Map();
    this.round = 0;
  }

  /** Draw a picture of this size; nodes that `paint` does not put again are removed. */
  draw(width, height, paint) {
    this.round += 1;
    this.last = new Map();
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    paint(this);
    for (const [name, one] of this.kept) {
      if (one.round === this.round) continue;
      one.node.remove();
      this.kept.delete(name);
    }
  }

  /** Put a node after the one that was put before it into the same parent, and return it. */
  put(name, tag, attributes = {}, words = null, parent = this.svg) {
    let one = this.kept.get(name);
    if (!one) {
      one = { node: document.createElementNS(NS, tag), attributes: {}, words: null };
      this.kept.set(name, one);
    }
    one.round = this.round;
    const before = this.last.get(parent) ?? null;
    if (one.node.parentNode !== parent || one.node.previousSibling !== before) {
      parent.insertBefore(one.node, before ? before.nextSibling : parent.firstChild);
    }
    this.last.set(parent, one.node);
    for (const key of Object.keys(one.attributes)) if (attributes[key] == null) one.node.removeAttribute(key);
    for (const [key, value] of Object.entries(attributes)) {
      if (value != null && one.attributes[key] !== value) one.node.setAttribute(key, value);
    }
    one.attributes = attributes;
    if (words !== null && words !== one.words) write(one.node, words);
    one.words = words;
    return one.node;
  }

  text(name, x, y, words, attributes = {}, parent = this.svg) {
    return this.put(name, "text", { x: round(x), y: round(y), ...attributes }, words, parent);
  }

  line(name, x1, y1, x2, y2, attributes = {}, parent = this.svg) {
    return this.put(name, "path", { d: `M${round(x1)} ${round(y1)}L${round(x2)} ${round(y2)}`, ...attributes }, null, parent);
  }

  rect(name, x, y, width, height, attributes = {}, parent = this.svg) {
    const box = { x: round(x), y: round(y), width: round(Math.max(width, 0)), height: round(Math.max(height, 0)) };
    return this.put(name, "rect", { ...box, ...attributes }, null, parent);
  }
}

/** Write words in which _{...} is a subscript and *...* is italic. */
function write(node, words) {
  if (node.tagName === "title") {
    node.textContent = words.replace(/_\{([^}]*)\}/g, "$1").replace(/\*/g, "");
    return;
  }
  node.textContent = "";
  let lowered = false;
  for (const part of words.split(/(_\{[^}]*\}|\*[^*]*\*)/)) {
    if (!part) continue;
    const span = document.createElementNS(NS, "tspan");
    const sub = part.startsWith("_{");
    span.textContent = sub ? part.slice(2, -1) : part.replace(/\*/g, "");
    if (sub) span.setAttribute("font-size", "0.78em");
    if (sub !== lowered) span.setAttribute("dy", sub ? "0.28em" : "-0.22em");
    if (sub || part.startsWith("*")) span.setAttribute("font-style", "italic");
    lowered = sub;
    node.append(span);
  }
}

export const round = (x) => Math.round(x * 100) / 100;

const INFERNO = ["000004", "210c4a", "57106e", "8a226a", "bc3754", "e45a31", "f98c0a", "f9c932", "fcffa4"].map(rgb);

function rgb(hex) {
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Return the colour of a share from 0 to 1. */
export function heat(share) {
  const at = Math.min(Math.max(share, 0), 1) * (INFERNO.length - 1);
  const low = Math.min(Math.floor(at), INFERNO.length - 2);
  const mixed = INFERNO[low].map((c, k) => Math.round(c + (at - low) * (INFERNO[low + 1][k] - c)));
  return `rgb(${mixed.join(",")})`;
}

/** Put a heat map as one rectangle a cell; the picture below shows through where little is taken. */
export function heatMap(sheet, name, values, x, y, width, height, most, parent) {
  const rows = values.length;
  const columns = values[0].length;
  values.forEach((row, r) =>
    row.forEach((value, c) => {
      const [left, right] = [c, c + 1].map((k) => x + (k * width) / columns);
      const [top, bottom] = [r, r + 1].map((k) => y + (k * height) / rows);
      const share = most > 0 ? value / most : 0;
      const look = { class: "cell", fill: heat(share), "fill-opacity": round(0.1 + 0.72 * share) };
      sheet.rect(`${name}.${r}.${c}`, left, top, right - left, bottom - top, look, parent);
    }),
  );
}

/** Return the half axes and the turn in degrees of a covariance [[a, b], [b, d]] at so many deviations. */
export function ellipse([[a, b], [, d]], deviations) {
  const middle = (a + d) / 2;
  const apart = Math.hypot((a - d) / 2, b);
  return {
    long: deviations * Math.sqrt(Math.max(middle + apart, 0)),
    short: deviations * Math.sqrt(Math.max(middle - apart, 0)),
    turn: (Math.atan2(2 * b, a - d) / 2) * (180 / Math.PI),
  };
}

/** Return the path through points. */
export function path(points) {
  return points.map(([x, y], k) => `${k ? "L" : "M"}${round(x)} ${round(y)}`).join("");
}

/** Write a number with a true minus sign, to so many decimals. */
export function number(value, decimals = 2) {
  const text = value.toFixed(decimals);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** Write a number of any size in about four characters. */
export function brief(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return value.toExponential(1).replaceAll("-", "−");
  return number(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
}

export function percent(share, decimals = 1) {
  return `${(100 * share).toFixed(decimals)}%`;
}

const ruler = document.createElement("canvas").getContext("2d");

/** Return the width of words in the font of an element. */
export function widthOf(words, element, bold = false) {
  const style = getComputedStyle(element);
  ruler.font = `${bold ? 650 : 400} ${style.fontSize} ${style.fontFamily}`;
  return ruler.measureText(words).width;
}

/** Cut words so that they fit a width. */
export function cut(words, room, element, bold = false) {
  if (widthOf(words, element, bold) <= room) return words;
  let end = words.length;
  while (end > 1 && widthOf(`${words.slice(0, end)}…`, element, bold) > room) end -= 1;
  return `${words.slice(0, end).trimEnd()}…`;
}

/** Break words into lines that fit a width. */
export function wrap(words, room, element) {
  const lines = [];
  for (const word of words.split(/\s+/)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && widthOf(longer, element) <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** Return the number of pixels of one unit of layout: 1 where text is 14 pixels high. */
export function unitOf(element) {
  return parseFloat(getComputedStyle(element).fontSize) / 14;
}

/** Return the width inside an element. */
export function roomIn(element) {
  const style = getComputedStyle(element);
  return Math.floor(element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

export const picture = (base64) => `data:image/png;base64,${base64}`;
