// What is chosen: a tensor with its shard map and chunks, or a value.

// Chunks that are drawn, and rows that a table has before it is asked for more.
const DRAWN = 4096;
const LISTED = 100;

const property = (name, value) =>
  el("div", {}, el("div", { class: "k" }, name), el("div", { class: "v" }, value));

// Who has a chunk: its rank where files tell, else its file.
function owner(file) {
  if (file === null || file >= report.files.length) return { name: fileName(file), order: -1 };
  const { rank, name } = report.files[file];
  return rank === null ? { name: printable(name), order: file } : { name: `rank ${rank}`, order: rank };
}

// Owners are told apart by hue, in their order from blue to orange.
const owners = Math.max(report.ranks.length
  ? report.ranks[report.ranks.length - 1].rank + 1 : report.files.length, 2);
const color = (order) => (order < 0 ? "var(--track)"
  : `oklch(0.75 0.085 ${255 - 215 * Math.min(order / (owners - 1), 1)})`);

function swatch(order) {
  const box = el("i", { class: "swatch" });
  box.style.background = color(order);
  return box;
}

// The rows of the columns that a tensor's chunks come in.
function chunksOf(key) {
  const { offsets, sizes, files, byte_offsets: places, byte_lens: lens } = key.chunks;
  const axes = key.shape.length;
  return files.map((file, index) => ({
    index,
    offsets: offsets.slice(index * axes, (index + 1) * axes),
    sizes: sizes.slice(index * axes, (index + 1) * axes),
    file,
    owner: owner(file),
    place: places[index],
    stored: lens[index],
  }));
}

const region = (chunk) =>
  `[${chunk.offsets.map((start, axis) => `${start}:${start + chunk.sizes[axis]}`).join(", ")}]`;

function describe(chunk) {
  const lines = [region(chunk)];
  if (chunk.owner.name !== fileName(chunk.file)) lines.push(chunk.owner.name);
  lines.push(fileName(chunk.file));
  if (chunk.stored !== null) lines.push(`${number(chunk.stored)} bytes at ${number(chunk.place)}`);
  return lines.join("\n");
}

// Axes along which chunks differ, and then the longest, until there are two.
function informative(key, chunks) {
  const axes = key.shape.map((_, axis) => axis);
  const cut = axes.filter((axis) => chunks.some((chunk) =>
    chunk.offsets[axis] !== chunks[0].offsets[axis] || chunk.sizes[axis] !== chunks[0].sizes[axis]));
  const chosen = cut.slice(0, 2);
  const rest = axes.filter((axis) => !chosen.includes(axis)).sort((a, b) => key.shape[b] - key.shape[a]);
  while (chosen.length < Math.min(2, axes.length)) chosen.push(rest.shift());
  return { chosen: chosen.sort((a, b) => a - b), cut };
}

function picture(key, chunks, down, across, lit) {
  const wide = key.shape[across];
  const high = down === null ? null : key.shape[down];
  // To scale, unless one side would be too short to be seen.
  const ratio = high === null ? 0.1 : high / wide;
  const drawnRatio = Math.min(Math.max(ratio, 0.16), 1.6);
  const width = Math.min(460, Math.round(420 / Math.max(drawnRatio, 0.5)));
  const height = high === null ? 52 : Math.round(width * drawnRatio);
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "data-map": "",
    "aria-label": `${chunks.length} chunks of ${key.name}`,
  }, svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("path", { d: "M0 0V6" }))),
  svg("rect", { class: "ground", width, height }), svg("rect", { class: "hole", width, height }));
  const boxes = new Map();
  let labels = 0;
  for (const chunk of chunks) {
    if (chunk.sizes.includes(0)) continue;
    const x = (chunk.offsets[across] / wide) * width;
    const w = (chunk.sizes[across] / wide) * width;
    const y = high === null ? 0 : (chunk.offsets[down] / high) * height;
    const h = high === null ? height : (chunk.sizes[down] / high) * height;
    const box = svg("rect", {
      class: "chunk", x, y, width: w, height: h, "data-i": chunk.index,
    });
    box.style.fill = color(chunk.owner.order);
    if (w < 3 || h < 3) {
      // An edge would be most of it, so neighbors differ in another way.
      box.classList.add("thin");
      if (chunk.index % 2) box.style.fillOpacity = "0.8";
    }
    boxes.set(chunk.index, box);
    drawing.append(box);
    if (w > 26 && h > 15 && chunk.owner.order >= 0) {
      const label = w > 62 ? chunk.owner.name : String(chunk.owner.order);
      if (label.length * 6.8 < w) {
        drawing.append(svg("text", { x: x + w / 2, y: y + h / 2 }, label));
        labels += 1;
      }
    }
  }
  hover(drawing, (index) => describe(chunks[index]), lit);
  return { drawing, boxes, labels, scaled: drawnRatio !== ratio && high !== null };
}

function shardMap(key, chunks) {
  const drawn = chunks.slice(0, DRAWN);
  if (!key.shape.length || key.shape.includes(0) || !drawn.length) return null;
  const { chosen, cut } = informative(key, drawn);
  let [down, across] = chosen.length > 1 ? chosen : [null, chosen[0]];
  const place = el("div");
  const state = { boxes: new Map(), rows: new Map(), lit: null };
  state.light = (index) => {
    for (const on of [false, true]) {
      if (on) state.lit = index;
      for (const node of [state.boxes.get(state.lit), state.rows.get(state.lit)]) {
        if (node) node.classList.toggle("lit", on);
      }
    }
  };
  const draw = () => {
    const { drawing, boxes, labels, scaled } = picture(key, drawn, down, across, state.light);
    state.boxes = boxes;
    const said = (axis) => `axis ${axis} · ${number(key.shape[axis])}`;
    const behind = cut.filter((axis) => axis !== down && axis !== across);
    const notes = [
      scaled && "The two axes have scales of their own.",
      behind.length && `Also cut along axis ${behind.join(", ")}: chunks lie behind each other.`,
      drawn.length < key.chunk_count && `The first ${number(drawn.length)} of ${plural(key.chunk_count, "chunk")} are drawn.`,
    ].filter(Boolean).join(" ");
    place.replaceChildren(el("div", { class: "map" },
      el("div", { class: "across" }, `${said(across)} →`),
      down === null ? el("span") : el("div", { class: "down" }, `${said(down)} →`), drawing),
    ...(labels < boxes.size ? [ownerLegend(drawn)] : []), ...(notes ? [el("p", { class: "muted" }, notes)] : []));
  };
  draw();
  const choose = (value, label, change) => {
    const list = el("select", { "aria-label": label, change: (event) => { change(Number(event.target.value)); draw(); } },
      key.shape.map((_, axis) => el("option", { value: axis }, `axis ${axis}`)));
    list.value = String(value);
    return list;
  };
  const axes = key.shape.length > 2 && el("div", { class: "axes" },
    "Down", choose(down, "Axis that runs down", (axis) => { down = axis; }),
    "Across", choose(across, "Axis that runs across", (axis) => { across = axis; }));
  return { node: el("div", {}, axes, place), state };
}

function ownerLegend(chunks) {
  const known = new Map();
  for (const chunk of chunks) if (!known.has(chunk.owner.order)) known.set(chunk.owner.order, chunk.owner.name);
  const shown = [...known].slice(0, 16).map(([order, name]) => el("span", {}, swatch(order), name));
  if (known.size > 16) shown.push(el("span", {}, `and ${known.size - 16} more`));
  return el("div", { class: "legend" }, shown);
}

function chunkTable(key, chunks, state) {
  const body = el("tbody");
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Region"), el("th", {}, "File"),
    el("th", { class: "num" }, "Stored bytes"), el("th", { class: "num" }, "At"))), body);
  const button = el("button", { type: "button", class: "more" });
  let shown = 0;
  const more = (count) => {
    for (const chunk of chunks.slice(shown, shown + count)) {
      const missing = chunk.file === null || (report.files[chunk.file] && report.files[chunk.file].bytes === null);
      const line = el("tr", { "data-i": chunk.index },
        el("td", {}, swatch(chunk.owner.order), region(chunk)),
        el("td", { class: missing ? "gone" : null }, fileName(chunk.file), missing && chunk.file !== null ? " (missing)" : ""),
        el("td", { class: "num" }, chunk.stored === null ? "–" : number(chunk.stored)),
        el("td", { class: "num" }, chunk.place === null ? "–" : number(chunk.place)));
      if (state) state.rows.set(chunk.index, line);
      body.append(line);
    }
    shown = Math.min(chunks.length, shown + count);
    button.hidden = shown >= chunks.length;
    button.textContent = `Show ${number(Math.min(1000, chunks.length - shown))} more`;
  };
  more(LISTED);
  button.addEventListener("click", () => more(1000));
  if (state) hover(body, () => "", state.light);
  const left = key.chunk_count - chunks.length;
  return [el("div", { class: "scroll" }, table), button,
    left > 0 && el("p", { class: "muted" }, `${plural(left, "more chunk")} ${left === 1 ? "is" : "are"} not on this page.`)];
}

function tensorPanel(key) {
  const chunks = chunksOf(key);
  const files = new Set(key.chunks.files);
  const elements = key.shape.reduce((product, size) => product * size, 1);
  const map = shardMap(key, chunks);
  return [
    el("h2", {}, printable(key.name) || "(no name)"),
    el("div", { class: "props" }, property("Type", key.dtype), property("Shape", shape(key.shape)),
      property("Elements", number(elements)), property("Bytes", `${number(key.bytes)}${key.bytes >= 1024 ? ` (${bytes(key.bytes)})` : ""}`),
      property("Chunks", number(key.chunk_count)), property("Files", number(files.size)),
      property("Part", key.part)),
    key.numbers && numbersPanel(key.numbers),
    map && el("h3", {}, "Shard map"), map && map.node,
    el("h3", {}, "Chunks"), chunks.length ? chunkTable(key, chunks, map && map.state)
      : el("p", { class: "muted" }, "None is stored."),
  ];
}

function objectPanel(key) {
  const known = "value" in key;
  const text = known ? python(key.value)
    : `The value is too long for this page: ${number(key.value_len)} characters.`;
  return [
    el("h2", {}, printable(key.name) || "(no name)"),
    el("div", { class: "props" }, property("Kind", "object"),
      known && property("Type", printable(typeName(key.value)))),
    el("h3", {}, "Value"), el("pre", {}, text),
  ];
}

function showKey(index) {
  const key = keys[index];
  const content = key.kind === "tensor" ? tensorPanel(key) : objectPanel(key);
  const detail = at("detail");
  detail.replaceChildren(...content.flat().filter(Boolean));
  detail.scrollTop = 0;
  tip(null, "");
}

// Before anything is chosen: where most of the bytes are.
function showLargest() {
  const tensors = keys.map((key, index) => [key, index]).filter(([key]) => key.kind === "tensor");
  tensors.sort(([a], [b]) => b.bytes - a.bytes);
  at("detail").replaceChildren(
    el("h2", { class: "plain" }, tensors.length ? "Largest tensors" : "There are no tensors"),
    el("ul", { class: "list" }, tensors.slice(0, 20).map(([key, index]) => el("li", {},
      el("button", { type: "button", click: () => goTo(index) },
        el("span", { class: "name", title: printable(key.name) }, el("bdi", {}, printable(key.name) || "(no name)")),
        el("span", { class: "size" }, bytes(key.bytes)))))));
}
