// Draws the charts of the page from the JSON in #chart-data. Names are untrusted text: they are
// only ever inserted as text nodes. Colours are variables of the style sheet, so that light, dark
// and print need no other drawing.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  const byId = (id) => document.getElementById(id);
  const drawn = [];

  const digits = (value) =>
    value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  const bytes = (value) => {
    for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]])
      if (value >= 0.9995 * size) return `${digits(value / size)}\u00a0${unit}`;
    return `${value.toFixed(0)}\u00a0B`;
  };
  const seconds = (value) => {
    if (value === 0) return "0\u00a0s";
    if (value >= 7200) return `${digits(value / 3600)}\u00a0h`;
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]])
      if (value >= 0.9995 * size) return `${digits(value / size)}\u00a0${unit}`;
    return `${digits(value / 1e-9)}\u00a0ns`;
  };

  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const lines = (...texts) => {
    const box = element("div", undefined, "tip");
    for (const text of texts) if (text) box.append(element("div", text));
    return box;
  };

  const INK = "var(--ink)", SOFT = "var(--soft)", RULE = "var(--rule)", PAGE = "var(--page)";
  const TEXT = { color: SOFT, fontFamily: "system-ui, sans-serif", fontSize: 12 };
  const axis = (over) => ({
    type: "value",
    axisLabel: { ...TEXT, hideOverlap: true, ...over.axisLabel },
    axisLine: { lineStyle: { color: SOFT } },
    axisTick: { lineStyle: { color: SOFT } },
    splitLine: { lineStyle: { color: RULE } },
    nameTextStyle: TEXT,
    ...Object.fromEntries(Object.entries(over).filter(([key]) => key !== "axisLabel")),
  });
  const tooltip = (formatter) => ({
    trigger: "item",
    confine: true,
    transitionDuration: 0,
    backgroundColor: PAGE,
    borderColor: SOFT,
    textStyle: { ...TEXT, color: INK },
    extraCssText: "white-space: normal; max-width: 20rem; overflow-wrap: anywhere;",
    formatter,
  });

  const draw = (id, option) => {
    const box = byId(id);
    if (!box) return null;
    box.textContent = "";
    box.classList.add("live");
    const chart = echarts.init(box, null, { renderer: "svg" });
    chart.setOption({ animation: false, ...option });
    drawn.push(chart);
    new ResizeObserver(() => chart.resize()).observe(box);
    return chart;
  };
  const group = (id, titles, choose) => {
    const box = byId(id);
    if (!box || titles.length < 2) return;
    box.hidden = false;
    titles.forEach((title, number) => {
      const button = element("button", title);
      button.type = "button";
      button.setAttribute("aria-pressed", String(number === 0));
      button.addEventListener("click", () => {
        for (const other of box.querySelectorAll("button"))
          other.setAttribute("aria-pressed", String(other === button));
        choose(number);
      });
      box.append(button);
    });
  };

  // Predicted beside measured: each amount relative to its prediction.
  const drawAmounts = () => {
    if (!data.amounts.length) return;
    const rows = [...data.amounts].reverse();
    const percent = (ratio) => `${ratio >= 1 ? "+" : ""}${((ratio - 1) * 100).toFixed(0)}\u00a0%`;
    const ends = rows.flatMap((row) => [row.low, row.high, row.measured, 1]);
    const low = Math.min(...ends), high = Math.max(...ends), margin = (high - low) * 0.08 || 0.01;
    const said = (hit) => lines(rows[hit.dataIndex].label, rows[hit.dataIndex].said);
    draw("amounts-chart", {
      grid: { left: 8, right: 24, top: 12, bottom: 8, containLabel: true },
      tooltip: tooltip(said),
      xAxis: axis({ min: low - margin, max: high + margin, axisLabel: { formatter: percent } }),
      yAxis: axis({
        type: "category", data: rows.map((row) => row.label),
        axisLabel: { color: INK }, splitLine: { show: false },
      }),
      series: [
        {
          type: "custom",
          data: rows.map((row, number) => [row.low, number, row.high]),
          encode: { x: [0, 2], y: 1 },
          renderItem: (_, api) => {
            const [x1, y] = api.coord([api.value(0), api.value(1)]);
            const [x2] = api.coord([api.value(2), api.value(1)]);
            return {
              type: "rect",
              shape: { x: x1, y: y - 7, width: Math.max(1, x2 - x1), height: 14 },
              style: { fill: "var(--held)", opacity: 0.3 },
              emphasisDisabled: true,
            };
          },
        },
        {
          type: "scatter", symbolSize: 12, itemStyle: { color: "var(--peak)" },
          emphasis: { disabled: true },
          data: rows.map((row, number) => [row.measured, number]),
          markLine: {
            silent: true, symbol: "none", data: [{ xAxis: 1 }],
            label: { show: false }, lineStyle: { color: SOFT, type: "dashed" },
          },
        },
      ],
    });
  };

  // The tensors alive at the peak, by module and source line.
  const FILLS = {
    parameter: "var(--tile-weights)", gradient: "var(--tile-gradients)",
    "optimizer state": "var(--tile-states)", activation: "var(--tile-activations)",
  };
  const drawPeak = () => {
    if (!data.peaks.length) return;
    const text = { ...TEXT, color: INK, overflow: "truncate" };
    const total = (peak) =>
      peak.tiles.flatMap((part) => part.children).reduce((sum, tile) => sum + tile.value, 0);
    const series = (peak) => ({
      id: "peak", type: "treemap", name: peak.title, roam: false, nodeClick: "zoomToNode",
      left: 0, right: 0, top: 0, bottom: 30,
      breadcrumb: {
        bottom: 0, height: 22, emptyItemWidth: 24,
        itemStyle: { color: PAGE, borderColor: SOFT, textStyle: { ...TEXT, color: INK } },
        emphasis: { itemStyle: { color: RULE, textStyle: { color: INK } } },
      },
      label: {
        ...text, lineHeight: 15, position: [4, 4],
        formatter: ({ data: tile }) => [tile.name, tile.line, tile.size].filter(Boolean).join("\n"),
      },
      upperLabel: { ...text, show: true, height: 20, fontWeight: 600, padding: [0, 4] },
      itemStyle: { borderColor: RULE },
      emphasis: { disabled: true },
      levels: [
        { itemStyle: { borderColor: PAGE, borderWidth: 0, gapWidth: 3 }, upperLabel: { show: false } },
        { itemStyle: { borderColor: RULE, borderWidth: 2, gapWidth: 2 } },
        { itemStyle: { borderColor: PAGE, borderWidth: 0, gapWidth: 1 } },
      ],
      data: peak.tiles.map((part) => ({
        name: part.name,
        itemStyle: { color: RULE },
        children: part.children.map((tile) => ({
          ...tile, itemStyle: { color: FILLS[tile.role] || "var(--tile-others)" },
          // No room for a label; the tooltip and the table have it.
          label: { show: tile.value > 0.02 * total(peak) },
        })),
      })),
    });
    const chart = draw("peak-chart", {
      tooltip: tooltip(({ name, value, data: tile }) =>
        lines(name, tile && tile.line, (tile && tile.said) || `~${bytes(value)}`)),
      series: [series(data.peaks[0])],
    });
    group("peak-choice", data.peaks.map((peak) => peak.title), (number) => {
      chart.setOption({ series: [series(data.peaks[number])] });
      byId("peak-chart").setAttribute("aria-label", `Tensors alive at the peak, ${data.peaks[number].title}; the tables below have the same figures`);
    });
  };

  // Memory over the step, with a cursor that names the tensors alive there.
  const drawMemory = () => {
    if (!data.memory.length) return;
    const [plan] = data.memory;
    const end = Math.max(...data.memory.map((one) => one.seconds[one.seconds.length - 1]));
    const highest = Math.max(...data.memory.map((one) => Math.max(...one.nbytes)));
    // A budget far above would flatten the curve; the text names it.
    const budget = data.budget && data.budget <= 3 * highest ? data.budget : null;
    const top = Math.max(budget || 0, highest);
    const step = 2 ** Math.ceil(Math.log2(top / 5));
    const line = (one, color, filled) => ({
      type: "line", step: "end", symbol: "none", silent: true, emphasis: { disabled: true },
      data: one.seconds.map((when, index) => [when, one.nbytes[index]]),
      lineStyle: { color, width: 1.5 }, itemStyle: { color },
      areaStyle: filled ? { color, opacity: 0.3 } : undefined,
    });
    const phases = plan.phases.map(([begin, phase], number) => [
      { xAxis: begin, name: phase, itemStyle: { color: `var(--${phase})` } },
      { xAxis: number + 1 < plan.phases.length ? plan.phases[number + 1][0] : plan.seconds[plan.seconds.length - 1] },
    ]);
    const wide = (begin, until) => (until - begin) / end > 0.08;
    for (const [begin, until] of phases) if (!wide(begin.xAxis, until.xAxis)) begin.name = "";
    const chart = draw("memory-chart", {
      grid: { left: 8, right: 16, top: 28, bottom: 8, containLabel: true },
      xAxis: axis({ min: 0, max: end, axisLabel: { formatter: seconds }, splitLine: { show: false } }),
      yAxis: axis({
        min: 0, interval: step, max: Math.ceil((top * 1.04) / step) * step,
        axisLabel: { formatter: bytes },
      }),
      series: [
        {
          ...line(plan, "var(--held)", true),
          markArea: { silent: true, label: { ...TEXT, position: "insideTop" }, data: phases },
          markLine: budget ? {
            silent: true, symbol: "none", data: [{ yAxis: budget }],
            lineStyle: { color: "var(--peak)", type: "dashed" },
            label: { ...TEXT, formatter: "budget", position: "insideEndTop" },
          } : undefined,
        },
        ...data.memory.slice(1).map((one) => line(one, "var(--bare)", false)),
        { id: "cursor", type: "line", data: [], silent: true },
      ],
    });
    if (!chart) return;
    const cursor = { of: 0, at: 0 };
    const slider = byId("memory-slider"), rows = byId("alive-rows"), where = byId("alive-at");
    const peakOf = (one) => one.nbytes.indexOf(Math.max(...one.nbytes));
    const nearest = (one, when) => {
      let low = 0, high = one.seconds.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (one.seconds[middle] <= when) low = middle; else high = middle - 1;
      }
      return low;
    };
    const phaseAt = (one, when) => one.phases.filter(([begin]) => begin <= when).pop()[1];
    const row = (nbytes, share, ...texts) => {
      const made = element("tr");
      made.append(element("td", `~${bytes(nbytes)}`, "n"), element("td", `${(share * 100).toFixed(1)}\u00a0%`, "n"));
      for (const text of texts) made.append(element("td", text));
      rows.append(made);
    };
    const show = () => {
      const one = data.memory[cursor.of], level = one.nbytes[cursor.at], when = one.seconds[cursor.at];
      const said = `${one.title}: ~${bytes(level)} at ~${seconds(when)}, ${phaseAt(one, when)}`;
      slider.max = one.seconds.length - 1;
      slider.value = cursor.at;
      slider.setAttribute("aria-valuetext", said);
      where.textContent = said;
      chart.setOption({
        series: [{
          id: "cursor",
          markLine: {
            silent: true, symbol: "none", animation: false, data: [{ xAxis: when }],
            label: { show: false }, lineStyle: { color: INK, type: "solid", width: 1 },
          },
        }],
      });
      rows.textContent = "";
      if (!one.alive) return;
      const groups = new Map();
      let known = 0;
      for (const [first, last, nbytes, path, source, what, why] of one.alive) {
        if (first > cursor.at || last < cursor.at) continue;
        const key = `${path} ${source} ${why}`;
        const found = groups.get(key) || { nbytes: 0, count: 0, path, source, why, what: new Set() };
        found.nbytes += nbytes;
        found.count += 1;
        found.what.add(data.names[what]);
        groups.set(key, found);
        known += nbytes;
      }
      const sorted = [...groups.values()].sort((a, b) => b.nbytes - a.nbytes);
      const most = sorted.slice(0, 12);
      for (const found of most) {
        const times = found.count > 1 ? ` x${found.count}` : "";
        row(found.nbytes, found.nbytes / level, data.names[found.path], data.names[found.source],
          [...found.what].join(", ") + times, data.names[found.why]);
      }
      const rest = known - most.reduce((sum, found) => sum + found.nbytes, 0);
      if (rest > 0) row(rest, rest / level, "the rest", "", `${sorted.length - most.length} lines`, "");
      if (level - known > 0)
        row(level - known, (level - known) / level, one.left_out ? "workspace and small tensors" : "workspace of the kernel", "", "", "");
    };
    const move = (to) => {
      if (to === cursor.at) return;
      cursor.at = to;
      show();
    };
    slider.addEventListener("input", () => move(Number(slider.value)));
    byId("memory-peak").addEventListener("click", () => move(peakOf(data.memory[cursor.of])));
    const follow = ({ offsetX, offsetY }) => {
      if (!chart.containPixel({ gridIndex: 0 }, [offsetX, offsetY])) return;
      const [when] = chart.convertFromPixel({ gridIndex: 0 }, [offsetX, offsetY]);
      move(nearest(data.memory[cursor.of], when));
    };
    chart.getZr().on("mousemove", follow);
    chart.getZr().on("click", follow);
    group("memory-choice", data.memory.map((one) => one.title), (number) => {
      const when = data.memory[cursor.of].seconds[cursor.at];
      cursor.of = number;
      cursor.at = nearest(data.memory[number], when);
      show();
    });
    byId("memory-cursor").hidden = false;
    if (!plan.alive) byId("alive-table").hidden = true;
    cursor.at = peakOf(plan);
    show();
  };

  const drawCurve = () => {
    if (!data.curve.length) return;
    const points = [...data.curve].sort((a, b) => a.nbytes - b.nbytes);
    const least = points[0].nbytes, most = points[points.length - 1].nbytes;
    const step = 2 ** Math.ceil(Math.log2((most - least || most) / 6));
    draw("curve-chart", {
      grid: { left: 8, right: 24, top: 28, bottom: 24, containLabel: true },
      tooltip: tooltip(({ data: point }) => lines(point.here ? "this plan" : "", point.said)),
      xAxis: axis({
        min: Math.floor(least / step) * step, max: Math.ceil(most / step) * step, interval: step,
        axisLabel: { formatter: bytes }, name: "memory", nameLocation: "middle", nameGap: 26,
      }),
      yAxis: axis({ scale: true, axisLabel: { formatter: seconds }, name: "step", nameTextStyle: { ...TEXT, align: "right" } }),
      series: [
        {
          type: "line", symbol: "none", silent: true, lineStyle: { color: "var(--bare)", width: 1 },
          data: points.map((point) => [point.nbytes, point.seconds]),
          markLine: data.budget ? {
            silent: true, symbol: "none", data: [{ xAxis: data.budget }],
            lineStyle: { color: "var(--peak)", type: "dashed" },
            label: { ...TEXT, formatter: "budget", position: "end" },
          } : undefined,
        },
        {
          type: "scatter", emphasis: { disabled: true },
          data: points.map((point) => ({
            value: [point.nbytes, point.seconds], said: point.said, here: point.here,
            symbolSize: point.here ? 16 : 10,
            itemStyle: { color: point.here ? "var(--held)" : PAGE, borderColor: "var(--held)", borderWidth: 2 },
            label: point.here ? { ...TEXT, color: INK, show: true, formatter: "this plan", position: "top" } : { show: false },
          })),
        },
      ],
    });
  };

  const drawSchedule = () => {
    const rows = data.schedule;
    if (!rows.length) return;
    const fills = { device: "var(--held)", wait: "var(--peak)", link: "var(--good)" };
    const blocks = rows.flatMap((row, number) =>
      row.blocks.map(([begin, end, where, what]) => ({
        value: [begin, number, end], row, where: data.names[where], what: data.names[what],
      })));
    const box = byId("schedule-chart");
    if (!box) return;
    box.style.height = `${70 + rows.length * 30}px`;
    const chart = draw("schedule-chart", {
      grid: { left: 8, right: 16, top: 8, bottom: 8, containLabel: true },
      tooltip: tooltip(({ data: block }) => lines(
        block.row.row, block.where, block.what,
        `~${seconds(block.value[2] - block.value[0])} from ~${seconds(block.value[0])}`)),
      dataZoom: [{
        type: "inside", xAxisIndex: 0, filterMode: "weakFilter", zoomOnMouseWheel: "ctrl",
        preventDefaultMouseMove: false,
      }],
      xAxis: axis({ min: 0, max: Math.max(...blocks.map((b) => b.value[2])), axisLabel: { formatter: seconds } }),
      yAxis: axis({
        type: "category", inverse: true, data: rows.map((row) => row.row),
        axisLabel: { color: INK, width: 110, overflow: "truncate" }, splitLine: { show: false },
      }),
      series: [{
        type: "custom", data: blocks, encode: { x: [0, 2], y: 1 }, clip: true,
        renderItem: ({ coordSys, dataIndex }, api) => {
          const [from, y] = api.coord([api.value(0), api.value(1)]);
          const [to] = api.coord([api.value(2), api.value(1)]);
          const x = Math.max(from, coordSys.x), end = Math.min(to, coordSys.x + coordSys.width);
          if (end < x) return null;
          const tall = api.size([0, 1])[1] * 0.64;
          return {
            type: "rect",
            shape: { x, y: y - tall / 2, width: Math.max(0.5, end - x), height: tall },
            style: { fill: fills[blocks[dataIndex].row.stream], stroke: PAGE, lineWidth: end - x > 4 ? 0.5 : 0 },
            emphasisDisabled: true,
          };
        },
      }],
    });
    const view = { start: 0, end: 100 };
    const zoom = (factor, shift) => {
      const half = Math.min(50, ((view.end - view.start) / 2) * factor);
      let middle = (view.start + view.end) / 2 + shift * half;
      middle = Math.min(100 - half, Math.max(half, middle));
      view.start = middle - half;
      view.end = middle + half;
      chart.dispatchAction({ type: "dataZoom", ...view });
    };
    const controls = byId("schedule-zoom");
    controls.hidden = false;
    for (const [title, factor, shift] of [["zoom in", 0.5, 0], ["zoom out", 2, 0], ["earlier", 1, -1], ["later", 1, 1]]) {
      const button = element("button", title);
      button.type = "button";
      button.addEventListener("click", () => zoom(factor, shift));
      controls.append(button);
    }
  };

  const filterPrices = () => {
    const field = byId("price-filter");
    if (!field) return;
    byId("price-search").hidden = false;
    const rows = [...document.querySelectorAll(".priced tbody tr")];
    const refused = byId("refused");
    field.addEventListener("input", () => {
      const asked = field.value.toLowerCase();
      let count = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(asked);
        if (!row.hidden) count += 1;
      }
      if (asked && refused) refused.open = true;
      byId("price-count").textContent = asked ? `${count} of ${rows.length}` : "";
    });
  };

  for (const one of [drawAmounts, drawPeak, drawMemory, drawCurve, drawSchedule, filterPrices]) one();

  // A printed page is narrower than most windows, and nothing on it can be opened; what would fill
  // many sheets stays closed.
  const closed = [];
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not([open], .long)")) {
      closed.push(part);
      part.open = true;
    }
    for (const chart of drawn) {
      chart.resize({ width: Math.min(660, chart.getWidth()) });
      chart.getZr().flush();
    }
  });
  addEventListener("afterprint", () => {
    for (const part of closed.splice(0)) part.open = false;
    for (const chart of drawn) chart.resize({ width: "auto" });
  });
})();
