// Making elements, saying numbers, and the tooltip. Texts of the checkpoint become text nodes only.

const report = JSON.parse(document.getElementById("report").textContent);

const at = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const grouped = new Intl.NumberFormat("en-US");
const number = (n) => grouped.format(n);
const plural = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;

function bytes(n) {
  if (n === null || n === undefined) return "–";
  if (n < 1024) return `${n} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = -1;
  do {
    n /= 1024;
    unit += 1;
  } while (n >= 1023.95 && unit < units.length - 1);
  return `${n.toFixed(n >= 100 ? 0 : 1)} ${units[unit]}`;
}

// 124.4 M, 8.03 B: as models are called.
function short(n) {
  if (n < 1e6) return number(n);
  n /= 1000;
  const units = ["M", "B", "T"];
  let unit = -1;
  do {
    n /= 1000;
    unit += 1;
  } while (n >= 999.5 && unit < units.length - 1);
  return `${n.toFixed(n >= 100 ? 1 : 2)} ${units[unit]}`;
}

const percent = (part, whole) => (whole > 0 ? `${((part / whole) * 100).toFixed(1)}%` : "–");

const shape = (sizes) => `[${sizes.join(", ")}]`;

function tip(event, text) {
  const box = at("tip");
  if (!text) {
    box.hidden = true;
    return;
  }
  box.textContent = text;
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const right = event.clientX + 14 + width > innerWidth;
  const below = event.clientY + 16 + height > innerHeight;
  box.style.left = `${Math.max(4, right ? event.clientX - width - 10 : event.clientX + 14)}px`;
  box.style.top = `${Math.max(4, below ? event.clientY - height - 10 : event.clientY + 16)}px`;
}

// Shows what `describe` says of the element under the pointer that has a data-i.
function hover(area, describe, lit) {
  let last = null;
  const leave = () => {
    last = null;
    tip(null, "");
    if (lit) lit(null);
  };
  area.addEventListener("pointermove", (event) => {
    const target = event.target.closest("[data-i]");
    if (!target || !area.contains(target)) return leave();
    const index = Number(target.dataset.i);
    if (index !== last && lit) lit(index);
    last = index;
    tip(event, describe(index));
  });
  area.addEventListener("pointerleave", leave);
}

const fileName = (index) =>
  index === null || index === undefined ? "not stored"
    : index < report.files.length ? printable(report.files[index].name) : `file ${index}`;
