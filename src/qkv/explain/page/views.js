// Two views of a matrix of weights: a heat-map, and lines between two columns of tokens.

const root = document.documentElement;
const find = id => document.getElementById(id);
const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
const four = weight => weight.toFixed(4);

function element(tag, attributes = {}, ...content) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") created.style.cssText = value;  // a content security policy may refuse style attributes
    else created.setAttribute(name, value);
  }
  created.append(...content);
  return created;
}

// Prepare a canvas of width × height CSS pixels at the resolution of the screen.
function pencil(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const draw = canvas.getContext("2d");
  draw.scale(ratio, ratio);
  return draw;
}

function thumbnail(canvas, rows, columns, values, units) {
  canvas.width = columns;
  canvas.height = rows;
  const [red, green, blue] = colour("--heat").split(" ").map(Number);
  const draw = canvas.getContext("2d"), image = draw.createImageData(columns, rows), pixels = image.data;
  for (let i = 0; i < values.length; i++) {
    pixels[4 * i] = red; pixels[4 * i + 1] = green; pixels[4 * i + 2] = blue;
    pixels[4 * i + 3] = 255 * Math.sqrt(values[i] / units);
  }
  draw.putImageData(image, 0, 0);
}

// ---- heat-map -------------------------------------------------------------------------------------------------------

class HeatMap {
  constructor(box, onPoint) {
    this.box = box;
    this.onPoint = onPoint;
    this.base = box.querySelector("canvas");
    this.pixels = document.createElement("canvas");  // one pixel per cell
    this.frames = ["frame step", "frame", "frame", "frame"].map(name => element("div", { class: name }));
    box.append(...this.frames);
    box.addEventListener("pointermove", event => this.pointAt(event));
    box.addEventListener("pointerdown", event => this.pointAt(event));
    box.addEventListener("pointerleave", () => onPoint(null, null));
    box.addEventListener("keydown", event => this.move(event));
    box.addEventListener("focus", () => { if (box.matches(":focus-visible")) onPoint(this.row ?? 0, this.column ?? 0); });
  }

  draw(matrix) {
    this.matrix = matrix;
    const { rows, columns } = matrix, crowded = Math.max(rows.length, columns.length) > 30;
    const font = `${crowded ? 10 : 13}px system-ui, sans-serif`, ruler = this.base.getContext("2d");
    ruler.font = font;
    const longest = words => Math.min(110, Math.max(...words.map(word => ruler.measureText(word).width)));
    this.left = Math.ceil(longest(rows)) + 10;
    this.top = Math.ceil(longest(columns) * 0.87) + 16;
    const slant = Math.ceil(longest(columns) / 2);  // the last label is slanted and extends to the right
    const whole = this.box.parentElement.clientWidth, room = share => Math.floor((share * whole - this.left - slant) / columns.length);
    const beside = room(0.62);  // cell size with the lines next to the map, used if both remain readable
    this.cell = Math.max(11, Math.min(34, whole > 600 && beside >= 14 ? beside : room(1)));
    this.width = this.left + columns.length * this.cell + slant;
    this.height = this.top + rows.length * this.cell + 2;
    const draw = pencil(this.base, this.width, this.height);
    draw.font = font;
    this.labels(draw);
    this.cells(draw);
  }

  labels(draw) {
    const { rows, columns } = this.matrix, { left, top, cell } = this;
    draw.fillStyle = colour("--ink");
    draw.textBaseline = "middle";
    draw.textAlign = "right";
    rows.forEach((word, i) => draw.fillText(word, left - 7, top + (i + 0.5) * cell, left - 8));
    draw.textAlign = "left";
    columns.forEach((word, j) => {
      draw.save();
      draw.translate(left + (j + 0.5) * cell, top - 6);
      draw.rotate(-Math.PI / 3);
      draw.fillText(word, 0, 0, 110);
      draw.restore();
    });
  }

  cells(draw) {
    const { rows, columns, values } = this.matrix, { left, top, cell } = this, n = columns.length;
    const ink = colour("--ink"), panel = colour("--panel"), wide = n * cell, high = rows.length * cell;
    thumbnail(this.pixels, rows.length, n, values, 1);
    draw.imageSmoothingEnabled = false;
    draw.drawImage(this.pixels, left, top, wide, high);
    draw.fillStyle = panel;  // gaps between the cells
    for (let i = 1; i < rows.length; i++) draw.fillRect(left, top + i * cell - 1, wide, 1);
    for (let j = 1; j < n; j++) draw.fillRect(left + j * cell - 1, top, 1, high);
    draw.strokeStyle = colour("--line");
    draw.strokeRect(left - 0.5, top - 0.5, wide + 1, high + 1);
    if (cell < 27) return;
    draw.font = `${Math.min(11, cell * 0.36)}px system-ui, sans-serif`;
    draw.textAlign = "center";
    values.forEach((weight, at) => {
      if (weight < 0.05) return;
      draw.fillStyle = weight > 0.5 ? panel : ink;
      draw.fillText(weight.toFixed(2), left + (at % n + 0.5) * cell - 0.5, top + (Math.floor(at / n) + 0.5) * cell + 0.5);
    });
  }

  // Outline the row of the current step, and the row, column and cell under the pointer.
  outline(row, column, step) {
    [this.row, this.column] = [row, column];
    const { rows, columns } = this.matrix, both = row !== null && column !== null;
    const frames = [[step, null], [row, null], [null, column], both ? [row, column] : [null, null]];
    frames.forEach(([i, j], at) => {
      const style = this.frames[at].style;
      style.display = i === null && j === null ? "none" : "block";
      style.left = `${this.left + (j ?? 0) * this.cell - 2}px`;
      style.top = `${this.top + (i ?? 0) * this.cell - 2}px`;
      style.width = `${(j === null ? columns.length : 1) * this.cell + 3}px`;
      style.height = `${(i === null ? rows.length : 1) * this.cell + 3}px`;
      style.opacity = both && (at === 1 || at === 2) ? 0.4 : 1;
    });
  }

  pointAt(event) {
    const place = this.base.getBoundingClientRect(), { rows, columns } = this.matrix;
    const column = Math.floor((event.clientX - place.left - this.left) / this.cell);
    const row = Math.floor((event.clientY - place.top - this.top) / this.cell);
    const inside = (i, n) => i >= 0 && i < n ? i : null;
    this.onPoint(inside(row, rows.length), inside(column, columns.length));
  }

  move(event) {
    const { rows, columns } = this.matrix, last = columns.length - 1;
    let [row, column] = [this.row ?? 0, this.column ?? 0];
    switch (event.key) {
      case "ArrowUp": row = Math.max(0, row - 1); break;
      case "ArrowDown": row = Math.min(rows.length - 1, row + 1); break;
      case "ArrowLeft": column = Math.max(0, column - 1); break;
      case "ArrowRight": column = Math.min(last, column + 1); break;
      case "Home": column = 0; break;
      case "End": column = last; break;
      default: return;
    }
    event.preventDefault();
    this.onPoint(row, column);
    const x = this.left + column * this.cell;  // keep the cell in sight where the map is wider than its box
    if (x < this.box.scrollLeft + this.left) this.box.scrollLeft = x - this.left;
    if (x + 2 * this.cell > this.box.scrollLeft + this.box.clientWidth) this.box.scrollLeft = x + 2 * this.cell - this.box.clientWidth;
  }
}

// ---- lines ----------------------------------------------------------------------------------------------------------

const FAINTEST = 0.02;  // lines below this weight are too faint to draw

class Lines {
  constructor(box, onPoint) {
    this.box = box;
    this.onPoint = onPoint;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.sides = ["query", "key"].map(side => element("div", { class: `side ${side}` }));
    this.named = ["", ""];
    box.append(this.sides[0], this.canvas, this.sides[1]);
    const point = event => {
      const token = event.target.closest(".token");
      if (token) onPoint(...(token.dataset.side === "0" ? [+token.dataset.index, null] : [null, +token.dataset.index]));
    };
    for (const name of ["pointerover", "focusin", "click"]) box.addEventListener(name, point);
    box.addEventListener("pointerleave", () => onPoint(null, null));
    box.addEventListener("focusout", event => { if (!box.contains(event.relatedTarget)) onPoint(null, null); });
    box.addEventListener("keydown", event => this.move(event));
  }

  draw(matrix) {
    this.matrix = matrix;
    const most = Math.max(matrix.rows.length, matrix.columns.length);
    this.high = most > 40 ? 18 : 25;
    this.box.style.setProperty("--high", `${this.high}px`);
    [matrix.rows, matrix.columns].forEach((tokens, side) => {
      if (this.named[side] === tokens.join(" ")) return;  // unchanged: another head of the same kind
      this.named[side] = tokens.join(" ");
      this.sides[side].replaceChildren(...tokens.map((token, index) =>
        element("button", { class: "token", type: "button", "data-side": side, "data-index": index, tabindex: index ? -1 : 0 }, token)));
    });
    this.width = Math.max(80, Math.min(220, this.box.clientWidth - 220));
    this.pen = pencil(this.canvas, this.width, most * this.high);
  }

  outline(row, column, step) {
    const { rows, columns, values } = this.matrix, { pen, width, high } = this, n = columns.length;
    const only = row ?? (column === null ? step : null);  // nothing pointed at: the lines of the current step, if any
    pen.clearRect(0, 0, width, this.canvas.height);
    pen.strokeStyle = `rgb(${colour("--heat")})`;
    for (let i = 0; i < rows.length; i++) {
      if (only !== null && i !== only) continue;
      for (let j = 0; j < n; j++) {
        const weight = values[i * n + j];
        if (weight < FAINTEST || (row === null && column !== null && j !== column)) continue;
        pen.globalAlpha = Math.min(1, weight);
        pen.lineWidth = 0.7 + 2.5 * weight;
        pen.beginPath();
        pen.moveTo(2, (i + 0.5) * high);
        pen.lineTo(width - 2, (j + 0.5) * high);
        pen.stroke();
      }
    }
    const shade = (side, weightOf, here) => [...this.sides[side].children].forEach((token, index) => {
      const weight = weightOf(index);
      token.style.setProperty("--weight", weight === null ? 0 : Math.sqrt(weight));
      token.classList.toggle("here", index === here);
      token.title = weight === null ? "" : four(weight);
    });
    shade(0, i => column === null || row !== null ? null : values[i * n + column], only);
    shade(1, j => only === null ? null : values[only * n + j], column);
  }

  move(event) {
    const token = event.target.closest(".token");
    if (!token) return;
    const side = +token.dataset.side, index = +token.dataset.index;
    const to = { ArrowUp: [side, index - 1], ArrowDown: [side, index + 1], ArrowLeft: [0, index], ArrowRight: [1, index],
      Home: [side, 0], End: [side, this.sides[side].children.length - 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    const there = this.sides[to[0]].children, next = there[Math.max(0, Math.min(there.length - 1, to[1]))];
    for (const other of there) other.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
