// The top of the page, and what starts the rest.

function drawHead() {
  const facts = [["Format", report.format], ...report.provenance];
  at("head").append(el("h1", {}, printable(report.name)), el("div", { class: "origin" },
    facts.map(([label, text]) => el("span", {}, `${label} `, el("b", {}, printable(text))))));
}

function drawNotices() {
  const { totals, cut } = report;
  const note = (text) => at("notices").append(el("div", { class: "notice" }, text));
  if (totals.missing_files) {
    const names = report.files.filter((file) => file.bytes === null).slice(0, 3).map((file) => printable(file.name));
    note(`${plural(totals.missing_files, "file")} ${totals.missing_files === 1 ? "is" : "are"} missing: ${names.join(", ")}${totals.missing_files > names.length ? ", …" : ""}`);
  }
  const bad = report.non_finite;
  if (bad && bad.tensors) {
    const first = keys.findIndex((key) => key.numbers && (key.numbers.nan || key.numbers.inf));
    at("notices").append(el("div", { class: "notice" },
      `${plural(bad.tensors, "tensor")} ${bad.tensors === 1 ? "holds" : "hold"} ${number(bad.nan)} NaN and ${number(bad.inf)} infinite numbers. `,
      first >= 0 && el("button", { type: "button", click: () => goTo(first) }, "Show the first")));
  }
  if (bad && bad.in_objects) {
    const places = bad.values.slice(0, 3).map(([key, path]) => printable(`${key}${path}`));
    note(`${plural(bad.in_objects, "number")} in objects ${bad.in_objects === 1 ? "is" : "are"} NaN or infinite: ${places.join(", ")}${bad.values.length > 3 ? ", …" : ""}`);
  }
  const left = [[cut.keys, "key"], [cut.chunks, "chunk"], [cut.values, "long value"], [cut.files, "file"], [cut.histograms, "histogram"]]
    .filter(([count]) => count).map(([count, what]) => plural(count, what));
  if (left.length) note(`To keep this page small, ${left.join(" and ")} are not listed. All sums include them.`);
}

function drawFacts() {
  const { totals } = report;
  const model = report.parts.find((share) => share.part === "model");
  const fact = (label, value, note) => el("div", { class: "fact" }, el("div", { class: "label" }, label),
    el("div", { class: "value" }, value), el("div", { class: "note" }, note));
  const facts = [
    fact("Parameters", short(totals.parameters), model && model.bytes !== totals.tensor_bytes ? `${bytes(model.bytes)} in the model`
      : totals.parameters < 1e6 ? "elements of the model" : number(totals.parameters)),
    fact("Tensor data", bytes(totals.tensor_bytes), `${number(totals.tensor_bytes)} bytes`),
    fact("Tensors", number(totals.tensors), `in ${plural(totals.chunks, "chunk")}`),
    fact("Objects", number(totals.objects), "values that are no tensors"),
    fact("On disk", bytes(totals.file_bytes), `in ${plural(totals.files, "file")}`),
  ];
  if (report.ranks.length) facts.push(fact("Ranks", number(report.ranks.length), "by names of files"));
  at("facts").append(...facts);
}

function startTheme() {
  const button = at("theme");
  const themes = ["Auto", "Light", "Dark"];
  let now = 0;
  button.addEventListener("click", () => {
    now = (now + 1) % themes.length;
    button.textContent = themes[now];
    if (now) document.documentElement.dataset.theme = themes[now].toLowerCase();
    else delete document.documentElement.dataset.theme;
  });
}

function followAddress() {
  let name;
  try {
    name = decodeURIComponent(location.hash.slice(1));
  } catch {
    return;
  }
  const index = name ? keys.findIndex((key) => key.name === name) : -1;
  if (index >= 0 && index !== selected) goTo(index);
}

drawHead();
drawNotices();
drawFacts();
drawCharts();
startTree();
showLargest();
startTheme();
followAddress();
addEventListener("hashchange", followAddress);
at("foot").append("Made by dcp. This page holds all it shows and loads nothing.");
document.documentElement.dataset.ready = "";
