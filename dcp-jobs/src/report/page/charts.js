// The panels above the contents: who has how many bytes.

// Rows up to this number have their names; more become columns side by side.
const NAMED = 10;
const COLUMNS = 240;

function chart(title, figure, ...content) {
  return el("article", { class: "panel chart" }, el("header", {}, el("h2", {}, title), figure),
    content);
}

function bars(items) {
  const most = Math.max(...items.map((item) => item.total), 1);
  return el("div", { class: "bars" }, items.map((item) => {
    const fills = item.parts.map((part, index) => {
      const box = el("div", { class: index ? "fill second" : "fill" });
      box.style.width = `${(part / most) * 100}%`;
      return box;
    });
    return [
      el("span", { class: "name mono", title: item.name }, item.name),
      el("div", { class: "track" }, fills),
      el("span", { class: item.gone ? "value gone" : "value" }, item.text),
    ];
  }));
}

// Of more items than there is room for, each column is the largest of some neighbors.
function columns(items, mean) {
  const each = Math.ceil(items.length / COLUMNS);
  const shown = [];
  for (let from = 0; from < items.length; from += each) {
    const group = items.slice(from, from + each);
    shown.push(group.reduce((a, b) => (b.total > a.total ? b : a)));
  }
  const most = Math.max(...shown.map((item) => item.total), 1);
  const gap = shown.length > 120 ? 0 : 1.5;
  const picture = svg("svg", {
    class: "columns", viewBox: `0 0 ${shown.length * 10} 100`, preserveAspectRatio: "none",
    role: "img", "aria-label": `${items.length} values as columns`,
  });
  shown.forEach((item, index) => {
    let top = 100;
    item.parts.forEach((part, which) => {
      const height = (part / most) * 97;
      top -= height;
      picture.append(svg("rect", {
        class: which ? "second" : "model", x: index * 10 + gap, y: top, width: 10 - 2 * gap,
        height,
      }));
    });
    picture.append(svg("rect", {
      class: "hit", x: index * 10, y: 0, width: 10, height: 100, "data-i": index,
    }));
  });
  if (mean) {
    const y = 100 - (mean / most) * 97;
    picture.append(svg("line", { x1: 0, x2: shown.length * 10, y1: y, y2: y }));
  }
  hover(picture, (index) => `${shown[index].name}\n${shown[index].text}`);
  const note = each > 1 ? `each column is the largest of ${each}` : "";
  return [
    picture,
    el("div", { class: "axis" }, el("span", {}, items[0].name), el("span", {}, note),
      el("span", {}, items[items.length - 1].name)),
  ];
}

function balance(title, items, imbalance) {
  const whole = items.filter((item) => !item.gone);
  const mean = whole.reduce((sum, item) => sum + item.total, 0) / Math.max(whole.length, 1);
  const most = whole.reduce((a, b) => (!a || b.total > a.total ? b : a), null);
  const high = imbalance !== null && imbalance >= 1.25;
  const figure = imbalance === null ? null
    : el("div", { class: high ? "figure high" : "figure", title: "The largest over the mean" },
      `${imbalance.toFixed(2)}×`, el("small", {}, " max / mean"));
  const drawn = items.length > NAMED ? columns(items, items.length > 1 ? mean : 0) : bars(items);
  const caption = whole.length > 1 && most
    ? `Mean ${bytes(Math.round(mean))}, most ${bytes(most.total)} in ${most.name}` : "";
  return chart(title, figure, drawn, caption && el("div", { class: "caption" }, caption));
}

function rankChart() {
  if (!report.ranks.length) return null;
  const items = report.ranks.map((rank) => ({
    name: `rank ${rank.rank}`, total: rank.bytes, parts: [rank.bytes],
    text: report.ranks.length > NAMED
      ? `${bytes(rank.bytes)}\n${plural(rank.files, "file")}, ${plural(rank.chunks, "chunk")}`
      : bytes(rank.bytes),
  }));
  return balance("Bytes by rank", items, report.rank_imbalance);
}

function fileChart() {
  // One file for each rank says what the ranks say.
  if (!report.files.length || (report.ranks.length === report.files.length
    && !report.totals.missing_files)) return null;
  const items = report.files.map((file) => ({
    name: printable(file.name), total: file.bytes || 0, parts: [file.bytes || 0], gone: file.bytes === null,
    text: file.bytes === null ? "missing" : report.files.length > NAMED
      ? `${bytes(file.bytes)}\n${plural(file.chunks, "chunk")}` : bytes(file.bytes),
  }));
  return balance("Bytes by file", items, report.file_imbalance);
}

const legend = (...entries) => el("div", { class: "legend" }, entries.map(([kind, text]) =>
  el("span", {}, el("i", { class: `swatch ${kind}` }), text)));

function kindChart() {
  if (!report.dtypes.length) return null;
  const whole = report.totals.tensor_bytes;
  const item = (name, share) => ({
    name, total: share.bytes, parts: [share.bytes],
    text: `${bytes(share.bytes)} · ${percent(share.bytes, whole)}`,
  });
  const parts = report.parts.length > 1
    ? [el("h3", {}, "Model and optimizer"), bars(report.parts.map((share) => item(share.part, share)))]
    : [];
  const figure = el("div", { class: "figure" }, bytes(whole));
  return chart("Element types", figure, bars(report.dtypes.map((share) => item(share.dtype, share))),
    parts);
}

function layerChart(stack) {
  const items = stack.layers.map((layer) => ({
    name: `layer ${layer.layer}`, total: layer.model_bytes + layer.optimizer_bytes,
    parts: [layer.model_bytes, layer.optimizer_bytes],
    text: [bytes(layer.model_bytes + layer.optimizer_bytes),
      layer.optimizer_bytes ? `model ${bytes(layer.model_bytes)}, optimizer ${bytes(layer.optimizer_bytes)}` : "",
      plural(layer.tensors, "tensor")].filter(Boolean).join("\n"),
  }));
  const both = stack.layers.some((layer) => layer.optimizer_bytes)
    && stack.layers.some((layer) => layer.model_bytes);
  const figure = el("div", { class: "figure" }, number(stack.layers.length),
    el("small", {}, " layers"));
  const few = items.length <= NAMED;
  if (few) items.forEach((item) => { item.text = bytes(item.total); });
  return chart(`Bytes by layer: ${printable(stack.name)}`, figure, few ? bars(items) : columns(items, 0),
    both && legend(["", "model"], ["second", "optimizer"]));
}

function drawCharts() {
  // A file may hold any number of lists of layers; the page shows the longest.
  const all = [rankChart(), fileChart(), kindChart(), ...report.stacks.slice(0, 3).map(layerChart)];
  const shown = all.filter(Boolean);
  at("charts").append(...shown);
  at("charts").classList.toggle("four", shown.length === 4);
}
