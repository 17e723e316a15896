// The numbers of a tensor: their range, and how many there are of each magnitude.

// As many digits as tell something; large and small ones as powers of ten.
function real(x) {
  if (x === null || x === undefined) return "–";
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return number(x);
  const size = Math.abs(x);
  return size >= 1e-4 && size < 1e6 ? String(Number(x.toPrecision(5))) : x.toExponential(3);
}

const power = (e) => `2^${e}`;

// A column for each power of two from the smallest to the largest magnitude.
function histogram({ exponents, negative, positive, count }) {
  const first = exponents[0];
  const last = exponents[exponents.length - 1];
  const bins = new Map(exponents.map((e, index) => [e, index]));
  const most = Math.max(...negative, ...positive, 1);
  const below = Math.max(...negative);
  const up = below ? 72 : 144;
  const height = 145;
  const wide = last - first + 1;
  const picture = svg("svg", {
    class: "histogram", viewBox: `0 0 ${wide * 10} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Histogram of magnitudes from ${power(first)} to ${power(last + 1)}`,
  });
  const gap = wide > 80 ? 0 : 1;
  for (let e = first; e <= last; e += 1) {
    const index = bins.get(e);
    const x = (e - first) * 10;
    if (index !== undefined) {
      const [high, low] = [(positive[index] / most) * up, (negative[index] / most) * up];
      picture.append(svg("rect", { class: "up", x: x + gap, y: up - high, width: 10 - 2 * gap, height: high }));
      if (low) picture.append(svg("rect", { class: "down", x: x + gap, y: up + 1, width: 10 - 2 * gap, height: low }));
    }
    picture.append(svg("rect", { class: "hit", x, y: 0, width: 10, height, "data-i": e }));
  }
  picture.append(svg("line", { x1: 0, x2: wide * 10, y1: up + 0.5, y2: up + 0.5 }));
  hover(picture, (e) => {
    const index = bins.get(e);
    const [high, low] = index === undefined ? [0, 0] : [positive[index], negative[index]];
    return [`${power(e)} to ${power(e + 1)} (${real(2 ** e)} to ${real(2 ** (e + 1))})`,
      `${number(high)} positive, ${percent(high, count)}`,
      `${number(low)} negative, ${percent(low, count)}`].join("\n");
  });
  return [picture,
    el("div", { class: "axis" }, el("span", {}, power(first)), el("span", {}, "magnitude"), el("span", {}, power(last + 1))),
    below ? legend(["", "positive"], ["second", "negative"]) : null];
}

function numbersPanel(numbers) {
  const bad = (name, value) => value > 0
    && el("div", {}, el("div", { class: "k" }, name), el("div", { class: "v gone" }, number(value)));
  const some = (name, value) => value > 0 && property(name, number(value));
  return [
    el("h3", {}, "Numbers"),
    el("div", { class: "props" }, property("Min", real(numbers.min)), property("Max", real(numbers.max)),
      property("Mean", real(numbers.mean)), property("Std", real(numbers.std)),
      property("Zero", percent(numbers.zero, numbers.count)), bad("NaN", numbers.nan), bad("Infinite", numbers.inf),
      numbers.first_non_finite && property("First of them at", shape(numbers.first_non_finite)),
      some("Subnormal", numbers.subnormal), some("Near overflow", numbers.near_overflow)),
    numbers.exponents.length > 0 && el("div", { class: "magnitudes" }, histogram(numbers)),
  ];
}
