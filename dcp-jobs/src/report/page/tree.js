// The keys as a tree of which only the rows in sight exist.

const ROW = 28;
// Names inside each other; what is deeper stays one name.
const DEEPEST = 40;
// Rows that are open at first, at most.
const OPEN_AT_FIRST = 40;

const keys = report.keys;
const root = grow();
let rows = [];
let words = [];
let current = 0;
let selected = -1;

function grow() {
  const node = (label) => ({ label, key: -1, bytes: 0, count: 0, open: false, own: false, kids: [], names: null });
  const top = node("");
  keys.forEach((key, index) => {
    const parts = key.name.split(".");
    const steps = parts.includes("") ? [key.name]
      : parts.length > DEEPEST ? [...parts.slice(0, DEEPEST), parts.slice(DEEPEST).join(".")] : parts;
    let here = top;
    for (const step of steps) {
      if (!here.names) here.names = new Map();
      let next = here.names.get(step);
      if (!next) {
        next = node(step);
        here.names.set(step, next);
        here.kids.push(next);
      }
      here = next;
    }
    // A second key of the same name, or one with others below it, is a row of its own.
    const leaf = node("");
    leaf.key = index;
    leaf.own = true;
    here.kids.push(leaf);
  });
  return settle(top);
}

// Sums sizes, joins what has one thing in it, sorts layers by number.
function settle(node, depth = 0) {
  node.names = null;
  if (node.key >= 0) {
    node.bytes = keys[node.key].bytes || 0;
    node.count = 1;
    return node;
  }
  node.kids.forEach((kid, index) => { node.kids[index] = settle(kid, depth + 1); });
  for (const kid of node.kids) {
    node.bytes += kid.bytes;
    node.count += kid.count;
  }
  const digits = /^\d+(\.|$)/;
  if (node.kids.every((kid) => digits.test(kid.label))) {
    node.kids.sort((a, b) => parseInt(a.label, 10) - parseInt(b.label, 10));
  }
  if (node.kids.length === 1 && depth > 0) {
    const [kid] = node.kids;
    kid.label = kid.own ? node.label : `${node.label}.${kid.label}`;
    kid.own = false;
    return kid;
  }
  return node;
}

// As many levels as fit are open; groups of which the whole would be too long stay closed.
function openSome() {
  let level = [root];
  let shown = 0;
  while (level.length) {
    const more = level.reduce((sum, node) => sum + node.kids.length, 0);
    if (shown + more > OPEN_AT_FIRST && shown > 0) break;
    level.forEach((node) => { node.open = true; });
    shown += more;
    level = level.flatMap((node) => node.kids.filter((kid) => kid.key < 0));
  }
  root.open = true;
}

const texts = [];
function text(index) {
  if (texts[index] === undefined) {
    const key = keys[index];
    const kind = key.dtype || ("value" in key ? typeName(key.value) : "");
    const bad = key.numbers ? `${key.numbers.nan ? " nan" : ""}${key.numbers.inf ? " inf" : ""}` : "";
    texts[index] = `${key.name} ${kind}${bad}`.toLowerCase();
  }
  return texts[index];
}

// Every word is in the text; `*` stands for anything.
function matches(index) {
  const all = text(index);
  return words.every((word) => {
    let from = 0;
    for (const part of word.split("*")) {
      const place = all.indexOf(part, from);
      if (place < 0) return false;
      from = place + part.length;
    }
    return true;
  });
}

function flatten() {
  const hits = words.length ? new Uint8Array(keys.length) : null;
  let found = 0;
  if (hits) keys.forEach((_, index) => { if (matches(index)) { hits[index] = 1; found += 1; } });
  const bySize = at("order").value === "size";
  rows = [];
  const visit = (node, depth) => {
    const kids = bySize ? [...node.kids].sort((a, b) => b.bytes - a.bytes) : node.kids;
    let any = false;
    for (const kid of kids) {
      if (kid.key >= 0) {
        if (hits && !hits[kid.key]) continue;
        rows.push({ node: kid, depth });
        any = true;
      } else if (hits) {
        const place = rows.length;
        rows.push({ node: kid, depth });
        if (visit(kid, depth + 1)) any = true;
        else rows.length = place;
      } else {
        rows.push({ node: kid, depth });
        if (kid.open) visit(kid, depth + 1);
      }
    }
    return any;
  };
  visit(root, 0);
  current = Math.max(0, Math.min(current, rows.length - 1));
  at("count").textContent = hits
    ? `${number(found)} of ${plural(keys.length, "key")}`
    : plural(keys.length, "key") + (report.cut.keys ? `, ${number(report.cut.keys)} more are not listed` : "");
  space.style.height = `${rows.length * ROW}px`;
  paint();
}

const space = el("div", { class: "space", role: "presentation" });

function marked(label) {
  const parts = words.flatMap((word) => word.split("*")).filter(Boolean);
  label = printable(label);
  const low = label.toLowerCase();
  const out = [];
  let from = 0;
  // Lower case of some letters is longer than they are.
  while (low.length === label.length && from < label.length && parts.length) {
    let place = -1;
    let length = 0;
    for (const part of parts) {
      const found = low.indexOf(part, from);
      if (found >= 0 && (place < 0 || found < place)) [place, length] = [found, part.length];
    }
    if (place < 0) break;
    out.push(label.slice(from, place), el("mark", {}, label.slice(place, place + length)));
    from = place + length;
  }
  out.push(label.slice(from));
  return out;
}

function row({ node, depth }, index) {
  const key = node.key >= 0 ? keys[node.key] : null;
  const open = node.open || words.length > 0;
  const tensor = key && key.kind === "tensor";
  const label = el("b", { title: key ? printable(key.name) : null }, marked(node.label || "(no name)"));
  const bad = tensor && key.numbers && (key.numbers.nan ? "NaN" : key.numbers.inf ? "Inf" : "");
  const name = el("span", { class: "label" }, el("i", {}, key ? "" : open ? "▾" : "▸"), label,
    bad && el("em", {}, bad));
  name.style.paddingLeft = `${Math.min(depth, 24) * 14}px`;
  const share = el("i", {});
  share.style.width = `${(node.bytes / Math.max(root.bytes, 1)) * 100}%`;
  const value = tensor ? shape(key.shape) : key
    ? ("value" in key ? brief(key.value) : `${number(key.value_len)} characters`)
    : plural(node.count, "key");
  const kind = tensor ? key.dtype : key && "value" in key ? printable(typeName(key.value)) : key ? "object" : "";
  const line = el("div", {
    class: `row${key ? "" : " group"}${index === current ? " at" : ""}${key && node.key === selected ? " on" : ""}`,
    role: "treeitem", id: `row-${index}`, "aria-level": depth + 1, "data-row": index,
    "aria-expanded": key ? null : String(open), "aria-selected": String(Boolean(key) && node.key === selected),
  },
  name,
  el("span", { class: "dim", title: kind }, kind),
  el("span", { class: key && !tensor ? "dim wide" : "dim", title: value }, value),
  key && !tensor ? null : el("span", { class: "num" }, node.bytes || tensor ? bytes(node.bytes) : ""),
  key && !tensor ? null : node.bytes ? el("span", { class: "share", title: `${percent(node.bytes, root.bytes)} of all listed tensors` }, share) : el("span"));
  line.style.top = `${index * ROW}px`;
  return line;
}

function paint() {
  const tree = at("tree");
  const first = Math.max(0, Math.floor(tree.scrollTop / ROW) - 8);
  const last = Math.min(rows.length, Math.ceil((tree.scrollTop + tree.clientHeight) / ROW) + 8);
  space.replaceChildren(...rows.slice(first, last).map((one, index) => row(one, first + index)));
  tree.setAttribute("aria-activedescendant", rows.length ? `row-${current}` : "");
}

function reveal(index) {
  const tree = at("tree");
  current = index;
  if (index * ROW < tree.scrollTop) tree.scrollTop = index * ROW;
  const low = (index + 1) * ROW - tree.clientHeight;
  if (low > tree.scrollTop) tree.scrollTop = low;
  paint();
}

function activate(index) {
  if (!rows[index]) return;
  const { node } = rows[index];
  current = index;
  if (node.key >= 0) {
    select(node.key);
  } else if (!words.length) {
    node.open = !node.open;
    flatten();
  }
}

function select(index) {
  selected = index;
  // The address of the page names the key, so that it can be kept and gone back to.
  const hash = `#${encodeURIComponent(keys[index].name)}`;
  if (location.hash !== hash) location.hash = hash;
  paint();
  showKey(index);
}

// Opens the groups around a key, and goes there.
function goTo(index) {
  const path = [];
  const find = (node) => {
    if (node.key === index) return true;
    return node.kids.some((kid) => find(kid) && path.push(kid));
  };
  find(root);
  path.forEach((node) => { if (node.key < 0) node.open = true; });
  if (words.length && !matches(index)) {
    at("search").value = "";
    words = [];
  }
  flatten();
  select(index);
  const place = rows.findIndex((one) => one.node.key === index);
  if (place >= 0) reveal(place);
}

function press(event) {
  const page = Math.max(1, Math.floor(at("tree").clientHeight / ROW) - 1);
  const here = rows[current];
  const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[event.key];
  if (move !== undefined) {
    reveal(Math.max(0, Math.min(rows.length - 1, current + move)));
  } else if (event.key === "Enter" || event.key === " ") {
    activate(current);
  } else if (event.key === "ArrowRight" && here && here.node.key < 0) {
    if (here.node.open || words.length) reveal(Math.min(current + 1, rows.length - 1));
    else activate(current);
  } else if (event.key === "ArrowLeft" && here) {
    if (here.node.key < 0 && here.node.open && !words.length) {
      activate(current);
    } else {
      let up = current;
      while (up > 0 && rows[up].depth >= here.depth) up -= 1;
      if (rows[up].depth < here.depth) reveal(up);
    }
  } else {
    return;
  }
  event.preventDefault();
}

function startTree() {
  const tree = at("tree");
  tree.append(space);
  openSome();
  flatten();
  tree.addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
  tree.addEventListener("click", (event) => {
    const line = event.target.closest("[data-row]");
    if (line) activate(Number(line.dataset.row));
  });
  tree.addEventListener("keydown", press);
  new ResizeObserver(paint).observe(tree);
  let timer = 0;
  at("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      words = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
      tree.scrollTop = 0;
      current = 0;
      flatten();
    }, keys.length > 20000 ? 120 : 0);
  });
  at("search").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    tree.focus();
    event.preventDefault();
  });
  at("order").addEventListener("change", flatten);
  at("fold").addEventListener("click", () => {
    const close = (node) => { node.open = false; node.kids.forEach(close); };
    close(root);
    root.open = true;
    current = 0;
    flatten();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      at("search").focus();
      event.preventDefault();
    }
  });
}
