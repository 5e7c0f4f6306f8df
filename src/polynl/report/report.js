"use strict";
// Draws influence maps: the share of every position in what the block adds at the one under the pointer.
(() => {
  const WARM = "213, 94, 0", COOL = "0, 114, 178";
  const STRONGEST = 3, SIDE = 640, STEPS = 127;

  const decoded = (text) => Int8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const percent = (share) => {
    const value = 100 * share, digits = Math.abs(value) < 10 ? 1 : 0;
    return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits) + " %";
  };
  const clamped = (value, limit) => Math.max(0, Math.min(limit - 1, value));

  function start(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const canvas = root.querySelector("canvas"), context = canvas.getContext("2d");
    const readout = root.querySelector(".readout");
    const blocks = [...root.querySelectorAll("button.block")], images = [...root.querySelectorAll("button.image")];
    const state = { block: 0, image: 0, row: 0, column: 0, picture: null };

    const current = () => data.blocks[state.block].maps[state.image];

    function shares() {
      const map = current(), [rows, columns] = map.sources, size = rows * columns;
      map.bytes = map.bytes || decoded(map.shares);
      const query = state.row * map.grid[1] + state.column, scale = map.scales[query];
      const found = map.bytes.subarray(query * size, (query + 1) * size);
      return { values: Array.from(found, (step) => (step / STEPS) * scale), scale, rows, columns };
    }

    function draw() {
      const { values, scale, rows, columns } = shares(), grid = current().grid;
      const width = canvas.width, height = canvas.height;
      // The image keeps its colours, which a class may depend on; small images keep their pixels too.
      context.imageSmoothingEnabled = state.picture.naturalWidth > 96;
      context.drawImage(state.picture, 0, 0, width, height);
      values.forEach((share, k) => {
        const row = Math.floor(k / columns), column = k % columns;
        const left = Math.round((column * width) / columns), top = Math.round((row * height) / rows);
        const right = Math.round(((column + 1) * width) / columns);
        const bottom = Math.round(((row + 1) * height) / rows);
        const strength = scale ? (0.9 * Math.abs(share)) / scale : 0;
        context.fillStyle = `rgba(${share < 0 ? COOL : WARM}, ${strength})`;
        context.fillRect(left, top, right - left, bottom - top);
      });
      const strongest = values.map((share, k) => [share, k]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
      const shown = scale ? strongest.slice(0, STRONGEST) : [];
      shown.forEach(([, k], place) => {
        number(place + 1, ((k % columns) + 0.5) * (width / columns), (Math.floor(k / columns) + 0.5) * (height / rows));
      });
      found(width, height);
      marked(state.column * (width / grid[1]), state.row * (height / grid[0]), width / grid[1], height / grid[0]);
      tell(values, scale, columns, shown, rows);
    }

    function number(text, x, y) {
      context.beginPath();
      context.arc(x, y, 14, 0, 2 * Math.PI);
      context.fillStyle = "rgba(255, 255, 255, 0.92)";
      context.fill();
      context.fillStyle = "#000";
      context.font = "bold 19px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(text, x, y + 1);
    }

    // The box of the detection.
    function found(width, height) {
      const box = current().box, [high, wide] = data.images[state.image].size;
      if (!box) return;
      const [left, right] = [box[0], box[2]].map((x) => (x * width) / wide);
      const [top, bottom] = [box[1], box[3]].map((y) => (y * height) / high);
      context.setLineDash([10, 6]);
      marked(left, top, right - left, bottom - top);
      context.setLineDash([]);
    }

    function marked(left, top, width, height) {
      for (const [colour, line] of [["#000", 7], ["#fff", 3]]) {
        context.strokeStyle = colour;
        context.lineWidth = line;
        context.strokeRect(left, top, width, height);
      }
    }

    function tell(values, scale, columns, shown, rows) {
      const [high, wide] = current().grid, against = values.reduce((sum, share) => sum + Math.min(share, 0), 0);
      root.querySelector(".low").textContent = scale ? percent(-scale) : "";
      root.querySelector(".high").textContent = scale ? percent(scale) : "";
      const lines = [];
      const line = (kind, text) => lines.push(Object.assign(document.createElement(kind), { textContent: text }));
      line("strong", `Row ${state.row + 1}, column ${state.column + 1} of ${high} × ${wide}`);
      if (!scale) {
        line("p", `${data.blocks[state.block].label} adds nothing here.`);
      } else {
        line("p", "Strongest contributors:");
        const list = document.createElement("ol");
        for (const [share, k] of shown) {
          const entry = document.createElement("li");
          entry.textContent = `row ${Math.floor(k / columns) + 1}, column ${(k % columns) + 1}: ${percent(share)}`;
          list.append(entry);
        }
        lines.push(list);
        const same = rows === high && columns === wide;
        const own = same ? `Its own share is ${percent(values[state.row * columns + state.column])}. ` : "";
        line("p", `${own}Negative shares: ${against ? percent(against) : "none"}.`);
      }
      if (current().found) line("p", `Dashed box: ${current().found}.`);
      readout.replaceChildren(...lines);
    }

    function begin() {
      [state.row, state.column] = current().start;
    }

    function move(row, column) {
      const [rows, columns] = current().grid;
      const [at, along] = [clamped(row, rows), clamped(column, columns)];
      if (at !== state.row || along !== state.column) {
        state.row = at;
        state.column = along;
        draw();
      }
    }

    function follow(event) {
      const box = canvas.getBoundingClientRect(), [rows, columns] = current().grid;
      move(
        Math.floor(((event.clientY - box.top) / box.height) * rows),
        Math.floor(((event.clientX - box.left) / box.width) * columns),
      );
    }

    function choose(block, image) {
      Object.assign(state, { block, image, picture: null });
      blocks.forEach((button, k) => button.setAttribute("aria-pressed", String(k === block)));
      images.forEach((button, k) => button.setAttribute("aria-pressed", String(k === image)));
      const [rows, columns] = current().grid, [height, width] = data.images[image].size;
      state.row = clamped(state.row, rows);
      state.column = clamped(state.column, columns);
      canvas.width = Math.round((SIDE * width) / Math.max(width, height));
      canvas.height = Math.round((SIDE * height) / Math.max(width, height));
      const picture = images[image].querySelector("img");
      picture.decode().then(() => {
        if (state.image === image && state.block === block) {
          state.picture = picture;
          draw();
        }
      });
    }

    canvas.addEventListener("pointermove", (event) => state.picture && follow(event));
    canvas.addEventListener("pointerdown", (event) => state.picture && follow(event));
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      if (event.key in steps && state.picture) {
        event.preventDefault();
        move(state.row + steps[event.key][0], state.column + steps[event.key][1]);
      }
    });
    blocks.forEach((button, k) => button.addEventListener("click", () => choose(k, state.image)));
    images.forEach((button, k) => button.addEventListener("click", () => {
      state.image = k;
      begin();
      choose(state.block, k);
    }));
    begin();
    choose(0, 0);
  }

  document.querySelectorAll(".influence").forEach(start);
})();
