// The weights at a glance: for each layer a dot at its RMS and a stem up to its largest magnitude, on a log axis.

const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(`--${variable}`).trim();

/** The smallest range of powers of ten that covers all positive magnitudes. */
function decades(layers) {
  let low = Infinity;
  let high = 0;
  for (const { rms, peak } of layers) {
    if (rms > 0) low = Math.min(low, rms);
    high = Math.max(high, peak, rms);
  }
  if (high === 0) return null;
  const ends = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  if (ends[0] === ends[1]) ends[1] += 1;
  return [10 ** ends[0], 10 ** ends[1]];
}

/** At most nine powers of ten within the range, for the grid lines. */
function powersOfTen([low, high]) {
  const [first, last] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  const step = Math.ceil((last - first) / 8);
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, index) => 10 ** (first + index * step));
}

const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const power = (number) => {
  const exponent = Math.round(Math.log10(number));
  if (exponent >= -2 && exponent <= 3) return String(Number(number.toPrecision(1)));
  return `10${exponent < 0 ? "⁻" : ""}${[...String(Math.abs(exponent))].map((digit) => SUPERSCRIPT[digit]).join("")}`;
};

function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x - size, y);
  context.lineTo(x + size, y);
  context.lineTo(x, y + 1.6 * size);
  context.fill();
}

/** Draws all layers at once; uPlot's series only serve its scales and its cursor. */
function drawLayers(chart, layers) {
  const context = chart.ctx;
  const ratio = devicePixelRatio;
  const { left, top, height, width } = chart.bbox;
  const step = width / Math.max(layers.length, 1);
  const radius = Math.max(1.6, Math.min(3.5, step / ratio / 2.4)) * ratio;
  const at = (value) => chart.valToPos(value, "y", true);
  const plain = colour("mark");
  const flagged = colour("bad");
  context.save();
  for (const isFlagged of [false, true]) {
    for (const layer of layers) {
      if (isBad(layer) !== isFlagged) continue;
      const x = chart.valToPos(layer.index, "x", true);
      context.fillStyle = context.strokeStyle = isFlagged ? flagged : plain;
      if (isFlagged) {
        context.globalAlpha = 0.12;
        const band = Math.max(4, Math.min(24, step / ratio)) * ratio;
        context.fillRect(x - band / 2, top, band, height);
      }
      context.globalAlpha = isFlagged ? 0.75 : 0.4;
      if (layer.rms > 0 && layer.peak > 0) {
        context.lineWidth = Math.max(1, Math.min(2 * ratio, step * 0.5));
        context.beginPath();
        context.moveTo(x, at(layer.rms));
        context.lineTo(x, at(layer.peak));
        context.stroke();
      }
      context.globalAlpha = 1;
      context.lineWidth = ratio;
      context.beginPath();
      context.arc(x, layer.rms > 0 ? at(layer.rms) : top + height - radius, isFlagged ? radius * 1.35 : radius, 0, 2 * Math.PI);
      if (layer.rms > 0) context.fill();
      else if (layer.zeros > 0) context.stroke(); // otherwise there is no finite value, which the triangle shows
      if (layer.nonfinite > 0) triangle(context, x, top + 2 * ratio, 4.5 * ratio);
    }
  }
  context.restore();
}

/** The histogram of a layer from minimum to maximum, null if the page has none. Each base-36 digit is the height of a bar. */
function histogramOf({ histogram, minimum, maximum }) {
  if (!histogram) return null;
  const heights = [...histogram].map((digit) => parseInt(digit, 36));
  const shape = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
    return element;
  };
  const fullest = heights.indexOf(35);
  const edge = (bar) => figure(minimum + (maximum - minimum) * bar / heights.length);
  const words = `from ${figure(minimum)} to ${figure(maximum)}, most from ${edge(fullest)} to ${edge(fullest + 1)}`;
  const svg = shape("svg", { class: "histogram", viewBox: `0 0 ${4 * heights.length} 36`, preserveAspectRatio: "none", role: "img", "aria-label": words });
  svg.append(shape("path", { d: heights.map((height, bar) => (height ? `M${4 * bar} 36v-${height}h3.5v${height}z` : "")).join("") }));
  return svg;
}

function tooltipOf(layer) {
  const lines = [
    ["RMS", figure(layer.rms)],
    ["from … to", `${figure(layer.minimum)} … ${figure(layer.maximum)}`],
    ["zeros", layer.zeros ? `${whole(layer.zeros)} (${percent(layer.zeros / Math.max(layer.numel, 1))})` : ""],
    ["not finite", layer.nonfinite ? whole(layer.nonfinite) : ""],
    ["flagged", layer.flagged.join(", ")],
  ];
  return [
    el("strong", {}, name(layer.key)),
    el("span", { className: "faint" }, `${shown(layer.dtype)} [${shown(layer.shape).replaceAll("x", ", ")}]`),
    histogramOf(layer) || "",
    el("dl", {}, facts(lines)),
  ];
}

/** The text alternative of the chart. */
function summaryOf(layers) {
  const flagged = layers.filter(isBad).length;
  const broken = layers.filter((layer) => layer.nonfinite > 0).length;
  const positive = layers.map((layer) => layer.rms).filter((rms) => rms > 0);
  const range = positive.length
    ? `RMS from ${figure(positive.reduce((a, b) => Math.min(a, b)))} to ${figure(positive.reduce((a, b) => Math.max(a, b)))}`
    : "all zero";
  return `${counted(layers.length, "layer")}, ${range}; ${flagged || "none"} flagged, ${broken || "none"} with non-finite values`;
}

/** Draws the chart into an element and returns a function that removes it. `pick` is called with the clicked layer. */
function weightsChart(box, layers, pick) {
  const range = decades(layers);
  if (range === null) {
    box.append(el("p", { className: "faint" }, "Nothing to draw: all values are zero or not finite."));
    return () => {};
  }
  const tip = el("div", { className: "tip", hidden: true });
  const frame = el("div", { className: "chart", role: "img", "aria-label": `Weights by layer: ${summaryOf(layers)}` });
  box.append(frame);
  let chart = null;
  const moved = (self) => {
    const layer = self.cursor.idx === null || self.cursor.left < 0 ? null : layers[self.cursor.idx];
    tip.hidden = !layer;
    if (!layer) return;
    tip.replaceChildren(...tooltipOf(layer));
    const left = self.cursor.left > self.over.clientWidth / 2 ? self.cursor.left - tip.offsetWidth - 12 : self.cursor.left + 12;
    tip.style.transform = `translate(${Math.max(0, left)}px, 8px)`;
  };
  const build = () => {
    if (chart) chart.destroy();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    chart = new uPlot(
      {
        width: Math.max(frame.clientWidth, 200),
        height: Math.max(220, Math.min(340, frame.clientWidth * 0.4)),
        legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: layers.length > 40, y: false } },
        scales: {
          x: { time: false, range: (self, low, high) => [low - 0.7, high + 0.7] },
          y: { distr: 3, range: () => range },
        },
        axes: [
          { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], label: "layer, in the file's order", labelSize: 22, labelFont: axis.font, size: 30 },
          // uPlot's own filter leaves some splits of a log axis without a label; ours are few enough to have one each.
          { ...axis, size: 54, splits: () => powersOfTen(range), filter: (self, splits) => splits, values: (self, splits) => splits.map(power) },
        ],
        series: [
          {},
          { paths: () => null, points: { show: false } },
          { paths: () => null, points: { show: false } },
        ],
        hooks: { draw: [(self) => drawLayers(self, layers)], setCursor: [moved] },
      },
      [
        layers.map((layer) => layer.index),
        layers.map((layer) => (layer.rms > 0 ? layer.rms : null)),
        layers.map((layer) => (layer.peak > 0 ? layer.peak : null)),
      ],
      frame,
    );
    chart.over.append(tip);
    chart.over.addEventListener("click", () => {
      if (chart.cursor.idx !== null) pick(layers[chart.cursor.idx]);
    });
  };
  build();
  let drawn = frame.clientWidth;
  const observer = new ResizeObserver(() => {
    if (frame.clientWidth && Math.abs(frame.clientWidth - drawn) > 4) {
      drawn = frame.clientWidth;
      build();
    }
  });
  observer.observe(frame);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", build);
  addEventListener("ckptfix-colours", build);
  return () => {
    observer.disconnect();
    scheme.removeEventListener("change", build);
    removeEventListener("ckptfix-colours", build);
    chart.destroy();
  };
}
