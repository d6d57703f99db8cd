// Panels as files: SVG that needs no other file, PNG made from it, and the data as JSON.

// What the style sheet says of a node, and what an SVG has without being told.
const INLINED = {
  fill: "rgb(0, 0, 0)",
  "fill-opacity": "1",
  stroke: "none",
  "stroke-opacity": "1",
  "stroke-width": "1px",
  "stroke-dasharray": "none",
  "stroke-linecap": "butt",
  "stroke-linejoin": "miter",
  opacity: "1",
  "font-family": "",
  "font-size": "",
  "font-weight": "400",
  "font-style": "normal",
  "font-variant-numeric": "normal",
  "text-anchor": "start",
  "dominant-baseline": "auto",
  "image-rendering": "auto",
  "shape-rendering": "auto",
  visibility: "visible",
};
const OF_TEXT = /^(font|text|dominant)/;
const MARGIN = 14;
const NS = "http://www.w3.org/2000/svg";

/** Return a copy of an SVG whose styles are attributes. */
function inlined(svg) {
  const copy = svg.cloneNode(true);
  const nodes = [svg, ...svg.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  nodes.forEach((node, k) => {
    const style = getComputedStyle(node);
    const text = node.tagName === "text" || node.tagName === "tspan";
    for (const [name, usual] of Object.entries(INLINED)) {
      if (OF_TEXT.test(name) && !text) continue;
      const value = style.getPropertyValue(name);
      if (value !== usual) copies[k].setAttribute(name, value);
    }
    for (const name of ["class", "tabindex", "role"]) copies[k].removeAttribute(name);
  });
  return copy;
}

/** Return the pieces of a sentence: {text, italic, shift}, where the shift is 1 for a subscript and -1 for a superscript. */
function pieces(node, look = { italic: false, shift: 0 }) {
  if (node.nodeType === Node.TEXT_NODE) return [{ text: node.textContent, ...look }];
  const of = { I: { italic: true }, SUB: { shift: 1 }, SUP: { shift: -1 } }[node.tagName] ?? {};
  return [...node.childNodes].flatMap((child) => pieces(child, { ...look, ...of }));
}

/** Break pieces into lines of at most this width; a word may have several pieces. */
function broken(sentence, width, widthOf) {
  const words = [[]];
  for (const { text, ...look } of sentence) {
    text.split(/\s+/).forEach((part, k) => {
      if (k) words.push([]);
      if (part) words.at(-1).push({ text: part, ...look });
    });
  }
  const lines = [];
  let used = Infinity;
  for (const word of words.filter((one) => one.length)) {
    const wide = word.reduce((sum, piece) => sum + widthOf(piece), 0);
    if (used + wide > width) {
      lines.push([...word]);
      used = wide;
    } else {
      lines.at(-1).push({ text: " ", italic: false, shift: 0 }, ...word);
      used += widthOf({ text: " ", italic: false, shift: 0 }) + wide;
    }
  }
  return lines;
}

/** Write a sentence in lines below y into an SVG; return the y below it. */
function writeLines(svg, sentence, y, width, { size, family, colour }) {
  const ruler = document.createElement("canvas").getContext("2d");
  const sizeOf = ({ shift }) => (shift ? 0.78 : 1) * size;
  const widthOf = (piece) => {
    ruler.font = `${piece.italic ? "italic " : ""}${sizeOf(piece)}px ${family}`;
    return ruler.measureText(piece.text).width;
  };
  for (const line of broken(sentence, width, widthOf)) {
    const font = { "font-family": family, "font-size": size, fill: colour, "xml:space": "preserve" };
    const text = node("text", { x: MARGIN, y: y + size, ...font });
    let now = 0;
    for (const piece of line) {
      const style = piece.italic ? "italic" : "normal";
      const span = node("tspan", { dy: 0.25 * size * (piece.shift - now), "font-size": sizeOf(piece), "font-style": style });
      span.textContent = piece.text;
      now = piece.shift;
      text.append(span);
    }
    svg.append(text);
    y += 1.4 * size;
  }
  return y;
}

function node(tag, attributes) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Stack drawings below a title and above a sentence; return one SVG that needs no other file. */
export function toSvg(drawings, title, says, panel) {
  const style = getComputedStyle(panel);
  const drawn = drawings.filter((svg) => svg.getBoundingClientRect().height > 0);
  const inner = Math.max(...drawn.map((svg) => Number(svg.getAttribute("width"))), 300);
  const whole = node("svg", { xmlns: NS });
  whole.append(node("rect", { width: "100%", height: "100%", fill: style.backgroundColor }));
  const family = style.fontFamily;
  const heading = [{ text: title, italic: false, shift: 0 }];
  let y = writeLines(whole, heading, MARGIN, inner, { size: 14, family, colour: style.color }) + 8;
  for (const svg of drawn) {
    const copy = inlined(svg);
    copy.setAttribute("x", MARGIN);
    copy.setAttribute("y", y);
    whole.append(copy);
    y += Number(svg.getAttribute("height")) + 8;
  }
  const colour = style.getPropertyValue("--quiet").trim();
  y = writeLines(whole, pieces(says), y, inner, { size: 13, family, colour });
  const [width, height] = [inner + 2 * MARGIN, Math.ceil(y + MARGIN)];
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  for (const [name, value] of Object.entries(size)) whole.setAttribute(name, value);
  return { text: new XMLSerializer().serializeToString(whole), width, height };
}

/** Return the PNG of an SVG, twice as wide and high. */
export async function toPng({ text, width, height }) {
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * width;
    canvas.height = 2 * height;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** Hand a file to the user. */
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
