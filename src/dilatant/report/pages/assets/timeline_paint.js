// What a group of lanes looks like: the share of them that is busy at each pixel, stacked by shade.

// For each pixel, the part of the lanes that is busy with each shade.
function occupancy(timeline, lanes, from, to, pixels) {
  const { start, seconds, stage, kind } = timeline.columns, { data, firstRow } = timeline;
  const kinds = data.kinds.length, scale = pixels / (to - from);
  const bins = new Map();
  for (const lane of lanes) {
    for (let row = firstRow[lane]; row < firstRow[lane + 1]; row++) {
      const left = Math.max((start[row] - from) * scale, 0), right = Math.min((start[row] + seconds[row] - from) * scale, pixels);
      if (right <= left) continue;
      const key = (stage[row] < 0 ? data.units.length : data.stages[stage[row]][0]) * kinds + kind[row];
      let slope = bins.get(key);
      if (!slope) bins.set(key, (slope = new Float32Array(pixels + 2)));
      addRamp(slope, left, 1);
      addRamp(slope, right, -1);
    }
  }
  for (const slope of bins.values()) {
    let sum = 0;
    for (let pixel = 0; pixel < pixels; pixel++) { sum += slope[pixel]; slope[pixel] = sum / lanes.length; }
  }
  return [...bins].sort((one, other) => one[0] - other[0]).map(([key, parts]) => {
    const unit = Math.floor(key / kinds);
    return { parts, fill: (timeline.shades[unit] ?? timeline.plain)[key % kinds].fill };
  });
}

// Adds a unit step at a fractional pixel to a list of differences: the pixel it falls into gets its covered part.
function addRamp(slope, at, sign) {
  const pixel = Math.floor(at), inside = at - pixel;
  slope[pixel] += sign * (1 - inside);
  slope[pixel + 1] += sign * inside;
}

function stack(pen, layers, x, y, height, pixels) {
  const floor = new Float32Array(pixels);
  for (const { parts, fill } of layers) {
    pen.fillStyle = fill;
    pen.beginPath();
    pen.moveTo(x, y + height);
    for (let pixel = 0; pixel < pixels; pixel++) pen.lineTo(x + pixel, y + height * (1 - Math.min(floor[pixel] + parts[pixel], 1)));
    for (let pixel = pixels - 1; pixel >= 0; pixel--) pen.lineTo(x + pixel, y + height * (1 - Math.min(floor[pixel], 1)));
    pen.fill();
    for (let pixel = 0; pixel < pixels; pixel++) floor[pixel] += parts[pixel];
  }
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
}
