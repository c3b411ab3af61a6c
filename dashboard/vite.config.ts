import tailwindcss from "@tailwindcss/vite";
import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

// `npm run dev` shows a coordinator that runs on its usual port.
const coordinator = "http://127.0.0.1:3000";

export default defineConfig({
  plugins: [react(), tailwindcss()],
  build: {
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: {
    proxy: { "/api": { target: coordinator, changeOrigin: true } },
  },
  test: {
    include: ["src/**/*.test.{ts,tsx}"],
    testTimeout: 30_000,
  },
});
